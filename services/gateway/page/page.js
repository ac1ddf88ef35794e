// Page of a gateway: the state of the service, live. It reads the JSON views that docs/using.md describes.

import { $, count, drawn, element, note, on, seconds, served, token, told } from "./base.js";
import "./turns.js";

const REFRESH_MS = 1000;

// --- rings and events ------------------------------------------------------------------------------------------------

let before = null;
let shownUntil = 0;
const KINDS = { lost: "bad", rebuilt: "good", failover: "warn", refusal: "bad", eviction: "warn" };

async function refresh() {
  try {
    const service = await told("/v1/service");
    served.model = service.model;
    $("login").hidden = !token.value;
    $("model").textContent = `${service.model} ${service.version}`;
    say(service.serves ? "good" : "bad", service.serves ? "It serves." : `It does not serve: ${service.fault}.`);
    $("rings-section").hidden = service.rings === undefined;
    if (service.rings) showRings(service);
    showEvents(service.events ?? []);
    if (before) compare(before, service);
    before = service;
  } catch (error) {
    $("login").hidden = error.status !== 401 && !token.value;
    const what = error.status === 401 ? "A token is needed" : "The gateway does not answer";
    say("bad", `${what}: ${error.message}`);
  }
}

function say(kind, words) {
  if ($("state").textContent !== words) $("state").textContent = words;
  $("state").className = kind;
}

function showRings(service) {
  const roles = ["prefill", "decode"].map((role) => {
    const rings = service.rings.filter((ring) => ring.role === role);
    const serving = rings.some((ring) => ring.state === "ready" && !ring.draining);
    const gap = serving ? [] : [element("p", { class: "gap" }, `no ${role} ring takes turns`)];
    const title = element("h3", {}, role);
    return element("div", { class: "role", "data-role": role }, title, ...rings.map(ringCard), ...gap);
  });
  $("rings").replaceChildren(...roles);
}

function stateOf(ring) {
  if (ring.state === "ready" && !ring.draining) return ["good", "ready"];
  if (ring.draining) return ["warn", ring.restarting ? "drains, to restart" : "drains"];
  return [ring.state === "rebuilding" ? "warn" : "bad", ring.state];
}

/** Draw a ring as a circle of its ranks; each is a bar of its KV blocks. */
function ringCard(ring) {
  const [kind, state] = stateOf(ring);
  const ranks = Math.max(ring.num_ranks, 1);
  const picture = drawn("svg", { viewBox: "0 0 200 150", role: "img", "aria-label": `KV of ${ring.name}` });
  picture.append(drawn("circle", { class: "circle", cx: 100, cy: 75, r: 52 }));
  const width = Math.max(4, Math.min(18, 300 / ranks));
  for (let rank = 0; rank < ranks; rank++) {
    const angle = (2 * Math.PI * rank) / ranks - Math.PI / 2;
    picture.append(rankBar(ring.kv_usage[rank], rank, 100 + 70 * Math.cos(angle), 75 + 50 * Math.sin(angle), width));
  }
  const words = [`${ring.num_requests_running} running, ${ring.num_requests_waiting} waiting`];
  if (ring.role === "prefill" && ring.queue_seconds !== null) words.push(`queue ${seconds(ring.queue_seconds)}`);
  if (ring.rebuilds) words.push(count(ring.rebuilds, "rebuild"));
  if (ring.decode_variant) words.push(ring.decode_variant);
  const title = element("b", {}, `${ring.name} `, element("span", { class: kind }, state));
  const work = element("p", {}, words.join(" · "));
  return element("div", { class: "ring", "data-ring": ring.name }, title, picture, work);
}

function rankBar(usage, rank, x, y, width) {
  const bar = drawn("g", {}, drawn("title"));
  const height = 34;
  const known = usage ?? { total_blocks: 0, active_blocks: 0, kept_blocks: 0, free_blocks: 0 };
  bar.firstChild.textContent = usage
    ? `rank ${rank}: ${usage.active_blocks} running, ${usage.kept_blocks} retained, ${usage.free_blocks} free KV blocks`
    : `rank ${rank}: not known`;
  let top = y + height / 2;
  for (const [kind, blocks] of [["running", known.active_blocks], ["cached", known.kept_blocks]]) {
    const tall = blocks && Math.max(2, (height * blocks) / known.total_blocks);  // a few blocks are seen too
    top -= tall;
    bar.append(drawn("rect", { class: kind, x: x - width / 2, y: top, width, height: tall }));
  }
  const tall = Math.max(0, top - (y - height / 2));
  bar.append(drawn("rect", { class: "free", x: x - width / 2, y: top - tall, width, height: tall }));
  return bar;
}

/** Add the events of the service that are not in the list yet: its router keeps the latest hundred. */
function showEvents(events) {
  for (const { at, kind, text, count: times } of events.filter((each) => each.at > shownUntil)) {
    const repeats = (line) => times > 1 && line.dataset.event === text;
    [...$("events").children].filter(repeats).forEach((line) => line.remove());
    const line = note(times > 1 ? `${text} (${times} times)` : text, KINDS[kind] ?? "", new Date(1000 * at));
    line.dataset.event = text;
    shownUntil = at;
  }
}

/** Note what changed between two states of the service and is no event of its router. */
function compare(old, now) {
  if (old.serves !== now.serves) note(now.serves ? "the service serves again" : now.fault, now.serves ? "good" : "bad");
  const known = new Map((old.rings ?? []).map((ring) => [ring.name, ring]));
  for (const ring of now.rings ?? []) {
    const then = known.get(ring.name);
    const preempted = then ? ring.num_preemptions - then.num_preemptions : 0;
    if (preempted > 0) note(`${ring.name}: ${count(preempted, "turn")} gave up KV blocks, to resume later`, "warn");
  }
  const moves = new Map((old.kv_moves ?? []).map((each) => [`${each.role} ${each.reason}`, each]));
  for (const each of now.kv_moves ?? []) {
    const then = moves.get(`${each.role} ${each.reason}`) ?? { moved: 0, failed: 0 };
    const why = { full: "its ring was full", drain: "its ring drains", turn: "its conversation left" }[each.reason];
    if (each.moved > then.moved) note(`retained KV of ${count(each.moved - then.moved, "conversation")} moved: ${why}`);
    if (each.failed > then.failed) note(`${count(each.failed - then.failed, "move")} of retained KV failed`, "warn");
  }
}

on("login", "submit", () => {
  token.value = $("token").value.trim();
  sessionStorage.setItem("token", token.value);
  before = null;  // another tenant's view
  shownUntil = 0;
  $("events").replaceChildren();
  refresh();
});
for (;;) {
  if (!document.hidden) await refresh();
  await new Promise((resolve) => setTimeout(resolve, REFRESH_MS));
}
