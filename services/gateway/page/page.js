// Page of a gateway: the state of the service, live. It reads the JSON views that docs/using.md describes.

import { $, count, drawn, element, note, on, row, seconds, served, token, told } from "./base.js";
import { listConversations } from "./turns.js";

const REFRESH_MS = 1000;
const LIST_MS = 5000;

// --- load ------------------------------------------------------------------------------------------------------------

const NONE = "\u2013";
const rate = (value) => (value >= 100 ? Math.round(value).toLocaleString("en") : value.toPrecision(2));
const share = (value) => `${Math.round(100 * value)} %`;
const time = (value) => (value === null ? NONE : seconds(value));

const MAX_SEEN = 120;
const seen = { running: [], used: [] };  // what the router knows now, as this page has seen it

function remember(series, value) {
  series.push(value);
  if (series.length > MAX_SEEN) series.shift();
  return series;
}

/** Show the load of this gateway and the room of the rings, now and in the last ten minutes, one tile each. */
function showLoad({ load, rings, uptime_seconds: uptime, running_turns: running }) {
  const { now, ten_minutes: ten, slices } = load;
  const past = (key) => slices.map((slice) => slice[key]);
  const waiting = rings.reduce((sum, ring) => sum + ring.num_requests_waiting, 0);
  const queue = Math.max(0, ...rings.map((ring) => ring.queue_seconds ?? 0));
  const room = kvOf(rings);
  const tiles = [
    ["Requests", `${rate(now.requests_per_second)} /s`, `${count(ten.requests, "request")} in 10 min`,
      past("requests_per_second")],
    ["Generated", `${rate(now.generated_tokens_per_second)} tok/s`,
      `${rate(ten.generated_tokens_per_second)} over 10 min`, past("generated_tokens_per_second")],
    ["Prompts", `${rate(now.prompt_tokens_per_second)} tok/s`,
      ten.cached_share === null ? "no prompt in 10 min" : `${share(ten.cached_share)} of them cached`,
      past("prompt_tokens_per_second")],
    ["First token", time(now.ttft_seconds_p50),
      `p95 ${time(now.ttft_seconds_p95)} · 10 min ${time(ten.ttft_seconds_p50)}, p95 ${time(ten.ttft_seconds_p95)}`,
      past("ttft_seconds_p50")],
    ["Between tokens", time(now.inter_token_seconds_p50),
      `p95 ${time(now.inter_token_seconds_p95)} · 10 min ${time(ten.inter_token_seconds_p50)}, ` +
      `p95 ${time(ten.inter_token_seconds_p95)}`, past("inter_token_seconds_p50")],
    ["Failed", ten.failed.toLocaleString("en"), `in 10 min; ${ten.refused.toLocaleString("en")} refused`,
      past("failed"), ten.failed ? "bad" : ""],
    ["Turns", running.toLocaleString("en"), `running; ${waiting} wait, ${queue ? seconds(queue) : "0 s"} of work`,
      remember(seen.running, running)],
    ["KV, fullest ring", room ? share(room.used) : NONE, room ? `${room.ring}; ${share(room.kept)} retained` : "",
      remember(seen.used, room ? room.used : null)],
  ];
  $("tiles").replaceChildren(...tiles.map(tile));
  $("load-words").textContent = `this gateway, up ${duration(uptime)}`;
}

function tile([name, value, words, series, kind = ""]) {
  return element("div", { class: "tile" }, element("h3", {}, name), element("b", { class: kind }, value), line(series),
    element("p", {}, words));
}

/** Draw a series as a line from the oldest on; what is not known is a gap. */
function line(series) {
  const known = series.filter((value) => value !== null && value !== undefined);
  const top = Math.max(...known, 1e-9);
  const picture = drawn("svg", { class: "series", viewBox: "0 0 120 24", preserveAspectRatio: "none", "aria-hidden": true });
  let points = [];
  const flush = () => {
    if (points.length > 1) picture.append(drawn("polyline", { points: points.join(" ") }));
    points = [];
  };
  series.forEach((value, at) => {
    if (value === null || value === undefined) return flush();
    points.push(`${120 - series.length + at},${23 - (22 * value) / top}`);
  });
  flush();
  return picture;
}

/** Return the shares of the fullest ring's KV that running turns use and that is retained. */
function kvOf(rings) {
  const shares = rings.filter((ring) => ring.kv_usage.length).map((ring) => {
    const sum = (key) => ring.kv_usage.reduce((total, rank) => total + rank[key], 0);
    const total = Math.max(1, sum("total_blocks"));
    return { ring: ring.name, used: sum("active_blocks") / total, kept: sum("kept_blocks") / total };
  });
  return shares.sort((a, b) => b.used + b.kept - a.used - a.kept)[0];
}

function duration(value) {
  const [days, hours, minutes] = [value / 86400, (value / 3600) % 24, (value / 60) % 60].map(Math.floor);
  if (days) return `${days} d ${hours} h`;
  return hours ? `${hours} h ${minutes} min` : `${minutes} min ${Math.floor(value % 60)} s`;
}

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
    $("load-section").hidden = service.load === undefined;
    if (service.load) showLoad(service);
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

const COLUMNS = ["ring", "state", "ranks", "running", "waiting", "queue", "KV used", "retained", "KV by rank", ""];

function showRings(service) {
  const head = element("thead", {}, row("th", COLUMNS));
  const bodies = ["prefill", "decode"].map((role) => {
    const rings = service.rings.filter((ring) => ring.role === role);
    const serving = rings.some((ring) => ring.state === "ready" && !ring.draining);
    const gap = element("td", { class: "gap", colspan: COLUMNS.length }, `no ${role} ring takes turns`);
    const gaps = serving ? [] : [element("tr", {}, gap)];
    return element("tbody", { "data-role": role }, ...rings.map(ringRow), ...gaps);
  });
  $("rings").replaceChildren(head, ...bodies);
}

function stateOf(ring) {
  if (ring.state === "ready" && !ring.draining) return ["good", "ready"];
  if (ring.draining) return ["warn", ring.restarting ? "drains, to restart" : "drains"];
  return [ring.state === "rebuilding" ? "warn" : "bad", ring.state];
}

function ringRow(ring) {
  const [kind, state] = stateOf(ring);
  const room = kvOf([ring]);
  const words = [];
  if (ring.tp > 1) words.push(`tp ${ring.tp}`);
  if (ring.decode_variant) words.push(ring.decode_variant);
  if (ring.rebuilds) words.push(count(ring.rebuilds, "rebuild"));
  const cells = [
    ring.name, element("span", { class: kind }, state), ring.num_ranks, ring.num_requests_running,
    ring.num_requests_waiting, ring.queue_seconds === null || ring.role !== "prefill" ? NONE : seconds(ring.queue_seconds),
    room ? share(room.used) : NONE, room ? share(room.kept) : NONE, rankBars(ring), words.join(" \u00b7 "),
  ];
  const made = row("td", cells);
  made.classList.add("ring");
  made.dataset.ring = ring.name;
  return made;
}

/** Draw the KV of a ring's ranks as one bar each. */
function rankBars(ring) {
  const ranks = Math.max(ring.num_ranks, 1);
  const width = Math.max(3, Math.min(14, 240 / ranks));
  const whole = ranks * (width + 2);
  const picture = drawn("svg", { class: "ranks", viewBox: `0 0 ${whole} 28`, width: whole, height: 28, role: "img",
    "aria-label": `KV of ${ring.name}` });
  for (let rank = 0; rank < ranks; rank++) picture.append(rankBar(ring.kv_usage[rank], rank, rank * (width + 2), width));
  return picture;
}

function rankBar(usage, rank, x, width) {
  const bar = drawn("g", {}, drawn("title"));
  const height = 28;
  const known = usage ?? { total_blocks: 0, active_blocks: 0, kept_blocks: 0, free_blocks: 0 };
  bar.firstChild.textContent = usage
    ? `rank ${rank}: ${usage.active_blocks} running, ${usage.kept_blocks} retained, ${usage.free_blocks} free KV blocks`
    : `rank ${rank}: not known`;
  let top = height;
  for (const [kind, blocks] of [["running", known.active_blocks], ["cached", known.kept_blocks]]) {
    const tall = blocks && Math.max(2, (height * blocks) / known.total_blocks);  // a few blocks are seen too
    top -= tall;
    bar.append(drawn("rect", { class: kind, x, y: top, width, height: tall }));
  }
  bar.append(drawn("rect", { class: "free", x, y: 0, width, height: Math.max(0, top) }));
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
let listedAt = 0;
for (;;) {
  if (!document.hidden) {
    await refresh();
    if (Date.now() - listedAt > LIST_MS) {
      listedAt = Date.now();
      await listConversations();
    }
  }
  await new Promise((resolve) => setTimeout(resolve, REFRESH_MS));
}
