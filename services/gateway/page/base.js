// What all parts of the page share: elements, calls of the gateway, and the list of events.

const TIMEOUT_MS = 10_000;
const MAX_EVENTS = 200;
export const token = { value: sessionStorage.getItem("token") ?? "" };
export const served = { model: "" };
export const $ = (id) => document.getElementById(id);

/** Make an element; text goes in as text, so nothing that a model or a client wrote is ever markup. */
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

export function drawn(name, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/** Make a row of a table; numbers stand at the right. */
export function row(kind, cells) {
  return element("tr", {}, ...cells.map((cell) => {
    const isNumber = typeof cell === "number" || (typeof cell === "string" && /^[\d.,]+( (ms|s|%))?$|^\u2013$/.test(cell));
    const shown = typeof cell === "number" ? cell.toLocaleString("en") : cell;
    return element(kind, isNumber ? { class: "number" } : {}, shown);
  }));
}

/** Write a time in seconds or milliseconds. */
export function seconds(value) {
  if (value >= 1) return `${value.toFixed(2)} s`;
  return `${(1000 * value).toFixed(value < 0.01 && value > 0 ? 1 : 0)} ms`;
}

export const count = (value, word) => `${value.toLocaleString("en")} ${word}${value === 1 ? "" : "s"}`;

/** Call the gateway. Throws an Error with its own sentence where it refuses. */
export async function call(path, options = {}) {
  const headers = { ...(token.value && { authorization: `Bearer ${token.value}` }), ...options.headers };
  const signal = options.signal ?? AbortSignal.timeout(TIMEOUT_MS);
  const answer = await fetch(path, { cache: "no-store", ...options, headers, signal });
  if (answer.ok) return answer;
  const found = await answer.json().catch(() => null);
  const error = new Error(found?.error?.message ?? `the gateway answered ${answer.status}`);
  error.status = answer.status;
  throw error;
}

export const told = async (path, options) => (await call(path, options)).json();
export const posted = (body) => ({
  method: "POST",
  headers: { "content-type": "application/json" },
  body: JSON.stringify(body),
});

/** Add an event to the list, the newest first, and return its line. */
export function note(words, kind = "", at = new Date()) {
  const shown = at.toDateString() === new Date().toDateString() ? at.toLocaleTimeString() : at.toLocaleString();
  const time = element("time", { datetime: at.toISOString() }, shown);
  const line = element("li", { class: kind }, time, words);
  $("events").prepend(line);
  while ($("events").children.length > MAX_EVENTS) $("events").lastChild.remove();
  return line;
}

/** Do `work` on an event of an element, instead of what the browser would do. */
export function on(id, kind, work) {
  $(id).addEventListener(kind, (event) => {
    event.preventDefault();
    work(event);
  });
}
