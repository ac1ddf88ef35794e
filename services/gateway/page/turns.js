// Chat with the plan of its last turn, and a conversation as a strip of tokens.

import { $, call, count, drawn, element, note, on, posted, row, seconds, served, told } from "./base.js";

const RANK_COLOURS = 8;
const MAX_LISTED = 200;

// --- chat ------------------------------------------------------------------------------------------------------------

let chat = { id: "", messages: [] };
let running = null;

function newChat() {
  running?.abort();
  chat = { id: `page-${crypto.getRandomValues(new Uint32Array(2)).join("-")}`, messages: [] };
  $("messages").replaceChildren();
  $("plan").hidden = true;
}

function addMessage(role, words) {
  const made = element("p", { class: `message ${role}` }, words);
  $("messages").append(made);
  $("messages").scrollTop = $("messages").scrollHeight;
  return made;
}

/** Yield the events of a stream of server-sent events. */
async function* eventsOf(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    const events = (waiting + part.value).split("\n\n");
    waiting = events.pop();
    for (const each of events) {
      if (each.startsWith("data: ") && each !== "data: [DONE]") yield JSON.parse(each.slice(6));
    }
  }
}

async function send(words) {
  const turn = chat;  // a chat that is begun meanwhile is another one
  running = new AbortController();
  busy(true);
  addMessage("user", words);
  const asked = [...turn.messages, { role: "user", content: words }];
  const shown = addMessage("assistant", "");
  try {
    const body = {
      model: served.model, messages: asked, stream: true, conversation_id: turn.id, temperature: 0,
      max_tokens: Number($("max-tokens").value) || undefined,  // empty: to the end of the model or of the context
    };
    let predicted = null;
    const answer = await call("/v1/chat/completions", { ...posted(body), signal: running.signal });
    for await (const event of eventsOf(answer)) {
      if (event.error) throw new Error(event.error.message);
      const choice = event.choices[0];
      shown.append(choice?.delta?.content ?? "");
      $("messages").scrollTop = $("messages").scrollHeight;
      predicted ??= event.ringserve?.plan ?? null;
      if (choice?.finish_reason) showTurn(predicted, event.ringserve);
    }
    turn.messages = [...asked, { role: "assistant", content: shown.textContent }];
    if (turn === chat) await showConversation(turn.id);
    await listConversations();
  } catch (error) {
    const sentence = error.name === "AbortError" ? "You stopped this answer." : error.message;
    shown.className = "message refused";
    shown.append(shown.textContent ? `\n${sentence}` : sentence);
    if (error.name !== "AbortError") note(`a turn of this page was refused or lost: ${sentence}`, "bad");
  } finally {
    busy(false);
  }
}

function busy(is) {
  if (!is) running = null;
  $("send").disabled = is;
  $("stop").hidden = !is;
}

const COLUMNS = ["", "queue", "pull", "prefill", "hand-off", "first token", "decode", ""];
const OTHER_PARTS = ["queue", "pull", "handoff"];

/** Show a finished turn: what was predicted, what was measured, and what else was compared, a row of times each. */
function showTurn(predicted, done) {
  const plan = done.plan;
  for (const each of plan.failovers) {
    note(`a turn lost its ${each.role} ring (${each.cause}) and went on after ${seconds(each.lost_seconds)}`, "warn");
  }
  const computed = plan.chunks.length ? plan.chunks : [{ start: 0, stop: 1, algorithm: plan.algorithm }];
  const measured = [
    ["queue", Math.max(plan.queue_seconds - plan.pull_seconds, 0)], ["pull", plan.pull_seconds],
    ...chunksOf(computed, plan.prefill_seconds), ["handoff", plan.handoff_seconds],
  ];
  const rings = predicted?.ring_alternatives ?? [];
  const decode = done.ttit_seconds * Math.max(done.token_ids.length - 1, 0);
  const rows = [["predicted", predictedParts(predicted), ""], ["measured", measured, "taken", decode]];
  for (const each of rings.filter((ring) => ring.ring !== plan.prefill_ring)) {
    rows.push([`on ${each.ring}`, ringParts(each, plan.algorithm), "other"]);
  }
  for (const each of predicted?.alternatives ?? []) {
    const isShown = each.algorithm === plan.algorithm || (each.algorithm === "decode_ring" && rings.length > 0);
    if (!isShown) rows.push([each.algorithm, [[each.algorithm, each.predicted_prefill_seconds]], "other"]);
  }
  const longest = Math.max(...rows.map(([, parts]) => total(parts)), 1e-9);
  $("bars").replaceChildren(element("thead", {}, row("th", COLUMNS)),
    element("tbody", {}, ...rows.map((each) => timeRow(each, longest))));
  const where = [...new Set([plan.prefill_ring, plan.decode_ring])].join(" -> ");
  $("reason").textContent =
    `${plan.algorithm} on ${where}: ${count(plan.new_tokens, "new token")}, ` +
    `${plan.cached_tokens.toLocaleString("en")} cached, first token after ${seconds(done.ttft_seconds)}`;
  const drafted = done.accepted_draft_tokens
    ? [["drafted", `${done.accepted_draft_tokens} of ${count(done.token_ids.length, "token")}, without a step of their own`]]
    : [];
  const why = [["why", plan.reason], ...drafted, ...(plan.remarks ?? []).map((each) => ["remark", each])];
  $("why").replaceChildren(...why.map(([name, text]) => element("tr", {}, element("th", {}, name), element("td", {}, text))));
  $("plan").hidden = false;
}

const total = (parts) => parts.reduce((sum, [, value]) => sum + value, 0);

function chunksOf(chunks, time) {
  const tokens = chunks.reduce((sum, each) => sum + each.stop - each.start, 0);
  return chunks.map((each) => [each.algorithm, (time * (each.stop - each.start)) / tokens]);
}

function predictedParts(plan) {
  const ring = plan?.ring_alternatives.find((each) => each.ring === plan.prefill_ring);
  if (ring) return ringParts(ring, plan.algorithm);
  return plan ? [[plan.algorithm, plan.predicted_prefill_seconds]] : [];
}

const ringParts = (ring, algorithm) => [
  ["queue", ring.queue_seconds], ["pull", ring.move_seconds], [algorithm, ring.prefill_seconds],
  ["handoff", ring.handoff_seconds + ring.stall_seconds],
];

/** Make a row of a turn's times, and the same as a bar. */
function timeRow([name, parts, kind, decode], longest) {
  const bar = element("div", { class: "bar" });
  for (const [part, value] of parts.filter(([, each]) => each > 0)) {
    const piece = element("i", { class: part, title: `${part} ${seconds(value)}` });
    piece.style.width = `${(100 * value) / longest}%`;
    bar.append(piece);
  }
  const of = (wanted) => total(parts.filter(([part]) => wanted(part)));
  const shown = (value) => (value > 0 ? seconds(value) : "\u2013");
  const [queue, pull, handoff] = OTHER_PARTS.map((part) => shown(of((each) => each === part)));
  const prefill = shown(of((each) => !OTHER_PARTS.includes(each)));
  const made = row("td", [name, queue, pull, prefill, handoff, shown(total(parts)), shown(decode ?? 0), bar]);
  if (kind) made.classList.add(kind);
  return made;
}

// --- a conversation --------------------------------------------------------------------------------------------------

const pathOf = (id) => `/v1/conversations/${encodeURIComponent(id)}`;

async function showConversation(id) {
  $("conversation-id").value = id;
  try {
    const view = (await told(pathOf(id))).ringserve;
    const best = Math.max(0, ...view.placements.map((each) => each.num_tokens));
    $("conversation-words").textContent =
      `${count(view.num_tokens, "token")} after ${count(view.num_turns, "turn")}; the next turn that follows them ` +
      `reuses ${best.toLocaleString("en")}.`;
    $("strip").replaceChildren(...view.placements.flatMap((place) => stripRow(place, Math.max(view.num_tokens, 1))));
  } catch (error) {
    $("conversation-words").textContent = error.message;
    $("strip").replaceChildren();
  }
}

/** Draw the tokens of a conversation that a ring holds, each coloured by its rank. */
function stripRow(place, length) {
  const picture = drawn("svg", { viewBox: `0 0 ${length} 10`, preserveAspectRatio: "none", role: "img",
    "aria-label": `tokens on ${place.ring}` });
  place.ranks.forEach((rank, number) => {
    for (const { start, stop } of rank.ranges) {
      const box = { x: start, y: 0, width: stop - start, height: 10 };
      const piece = drawn("rect", { class: `rank${number % RANK_COLOURS}`, ...box }, drawn("title"));
      piece.firstChild.textContent = `rank ${number}: tokens ${start} to ${stop - 1}`;
      picture.append(piece);
    }
  });
  return [element("p", {}, `${place.ring} (${place.role}): ${count(place.num_tokens, "token")}`), picture];
}

/** List the conversations that were used last; one that is clicked is shown. */
export async function listConversations() {
  try {
    const listing = await told("/v1/conversations?limit=1000");
    const known = listing.data.map((each) => each.ringserve).sort((a, b) => a.idle_seconds - b.idle_seconds);
    const head = element("thead", {}, row("th", ["conversation", "turns", "tokens", "retained", "last used"]));
    const rows = known.slice(0, MAX_LISTED).map(conversationRow);
    const more = known.length > MAX_LISTED || listing.has_more ? [row("td", ["... and more"])] : [];
    $("conversations").replaceChildren(head, element("tbody", {}, ...rows, ...more));
    $("conversations").hidden = known.length === 0;
  } catch {
    // The sentence at the top says why.
  }
}

function conversationRow(each) {
  const pick = element("button", { type: "button", class: "pick" }, each.conversation_id);
  pick.addEventListener("click", () => change(showConversation, each.conversation_id));
  const used = each.running_request_id ? "runs now" : `${ago(each.idle_seconds)} ago`;
  return row("td", [pick, each.num_turns, each.num_tokens, Math.max(each.kept_on_prefill, each.kept_on_decode), used]);
}

const ago = (value) => (value < 60 ? `${Math.round(value)} s` : value < 3600 ? `${Math.round(value / 60)} min` :
  `${Math.round(value / 3600)} h`);

/** Do something to the conversation whose id is given, and say how it went. */
async function change(work, id = $("conversation-id").value.trim()) {
  if (!id) return;
  try {
    await work(id);
  } catch (error) {
    $("conversation-words").textContent = error.message;
  }
}

async function fork(id) {
  const made = `${id.slice(0, 200)}-${crypto.getRandomValues(new Uint32Array(1))[0].toString(36)}`;
  await told("/v1/conversations", posted({ id: made, forked_from: id }));
  note(`${made} begins with the tokens of ${id}`);
  await showConversation(made);
  await listConversations();
}

async function forget(id) {
  await told(pathOf(id), { method: "DELETE" });
  note(`${id} was deleted`);
  if (id === chat.id) newChat();
  $("strip").replaceChildren();
  $("conversation-words").textContent = `${id} is deleted.`;
  await listConversations();
}

on("chat", "submit", () => {
  const words = $("prompt").value.trim();
  if (!words || running) return;
  $("prompt").value = "";
  send(words);
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("chat").requestSubmit();
});
on("stop", "click", () => running?.abort());
on("new-chat", "click", newChat);
on("conversation", "submit", () => change(showConversation));
on("fork", "click", () => change(fork));
on("delete", "click", () => change(forget));

newChat();
