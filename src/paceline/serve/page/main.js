// The page: a chat whose tokens show where they come from, and a race of one prompt with and without guessing.

import { models, written } from "./api.js";
import { Gauges } from "./gauges.js";
import { Answer, listen } from "./tokens.js";

const at = (id) => document.getElementById(id);
const conversation = [];
let running = null; // the AbortController of what is being written
let view = "chat";
let model = null;

// --- what the user chose ---------------------------------------------------------------------------------------------

function speculative(on) {
  if (!on) return { method: "none", num_draft_tokens: 0 };
  const k = at("draft-tokens").value;
  return { method: at("method").value, num_draft_tokens: k === "auto" ? "auto" : Number(k) };
}

function request(messages, on, temperature) {
  const most = Math.max(1, Math.round(Number(at("max-tokens").value)) || 256);
  return { model, messages, temperature, max_tokens: most, speculative: speculative(on) };
}

// --- writing ---------------------------------------------------------------------------------------------------------

async function write(body, place, onPiece = () => {}) {
  const answer = new Answer(place);
  const gauges = new Gauges();
  for await (const piece of written(body, at("key").value, running.signal)) {
    for (const token of piece.tokens) answer.add(token, piece.guessed);
    if (piece.tokens.length) gauges.add(piece);
    onPiece(answer, gauges);
  }
  gauges.finish();
  return { answer, gauges };
}

function busy(on) {
  running = on ? new AbortController() : null;
  at("send").disabled = on;
  at("stop").hidden = !on;
  if (on) at("stop").focus();
  else at("prompt").focus();
}

function element(tag, kind, text = "") {
  const made = document.createElement(tag);
  made.className = kind;
  made.textContent = text;
  return made;
}

function failed(error) {
  if (error.name === "AbortError") return "stopped";
  return error.message || "the connection was lost";
}

async function chat(prompt) {
  const log = at("log");
  at("hint").hidden = true;
  conversation.push({ role: "user", content: prompt });
  const message = element("div", "message assistant");
  const place = element("div", "answer");
  place.tabIndex = 0;
  place.setAttribute("aria-label", "Answer; arrow keys tell about each token");
  message.append(place);
  log.append(element("div", "message user", prompt), message);
  const follow = () => { log.scrollTop = log.scrollHeight; };
  follow();
  try {
    const on = at("speculation").checked;
    const body = request(conversation, on, Number(at("temperature").value) || 0);
    const { answer, gauges } = await write(body, place, follow);
    message.append(element("p", "figures", gauges.words));
    at("said").textContent = `Answer: ${answer.text}`;
  } catch (error) {
    const stopped = error.name === "AbortError";
    message.append(element("p", stopped ? "figures" : "figures error", failed(error)));
    at("said").textContent = failed(error);
  }
  conversation.push({ role: "assistant", content: place.textContent });
  follow();
}

async function lane(name, prompt, on) {
  const place = at(`lane-${name}`);
  place.replaceChildren();
  const bar = at(`lane-${name}-bar`);
  bar.value = 0;
  const body = request([{ role: "user", content: prompt }], on, 0);
  const started = performance.now();
  const done = await write(body, place, (answer, gauges) => {
    bar.value = answer.count / body.max_tokens;
    const seconds = ((performance.now() - started) / 1000).toFixed(1);
    at(`lane-${name}-figures`).textContent = `${answer.count} tokens, ${gauges.rounds} passes, ${seconds} s`;
  });
  bar.value = 1;
  at(`lane-${name}-figures`).textContent = done.gauges.words;
  return done;
}

async function race(prompt) {
  at("verdict").textContent = "";
  for (const name of ["off", "on"]) {
    at(`lane-${name}`).replaceChildren();
    at(`lane-${name}-figures`).textContent = "";
    at(`lane-${name}-bar`).value = 0;
  }
  try {
    const off = await lane("off", prompt, false);
    const on = await lane("on", prompt, true);
    const ratio = on.gauges.speed / off.gauges.speed;
    const same = on.answer.text === off.answer.text ? "the same text" : "not the same text (a near-tie fell differently)";
    const passes = `${on.gauges.rounds} passes instead of ${off.gauges.rounds}`;
    at("verdict").textContent = `${ratio.toFixed(2)} times the speed, ${passes}; ${same}.`;
  } catch (error) {
    at("verdict").textContent = failed(error);
  }
}

async function submit(event) {
  event?.preventDefault();
  const prompt = at("prompt").value.trim();
  if (!prompt || running) return;
  busy(true);
  if (view === "chat") at("prompt").value = "";
  await (view === "chat" ? chat(prompt) : race(prompt));
  busy(false);
}

// --- the frame -------------------------------------------------------------------------------------------------------

function choose(name) {
  view = name;
  for (const each of ["chat", "race"]) {
    at(each).hidden = each !== name;
    at(`tab-${each}`).setAttribute("aria-selected", String(each === name));
    at(`tab-${each}`).tabIndex = each === name ? 0 : -1;
  }
  at("send").textContent = name === "chat" ? "Send" : "Race";
  for (const each of [at("speculation").closest("label"), at("clear")]) each.hidden = name === "race";
}

function fill(select, values, chosen) {
  select.replaceChildren(...values.map((value) => new Option(value, value, false, value === String(chosen))));
}

async function connect() {
  try {
    const [first] = await models(at("key").value);
    model = first.id;
    const about = first.x_paceline;
    const methods = about.methods.filter((method) => !["none", "prediction"].includes(method));
    fill(at("method"), methods, methods[0]);
    fill(at("draft-tokens"), ["auto", "1", "2", "3", "4", "6", "8", "12", "16"], about.num_draft_tokens);
    at("model").textContent = model;
  } catch (error) {
    at("model").textContent = error.message || "the server cannot be reached";
  }
}

function clear() {
  conversation.length = 0;
  for (const message of at("log").querySelectorAll(".message")) message.remove();
  at("hint").hidden = false;
  at("prompt").focus();
}

at("composer").addEventListener("submit", submit);
at("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
});
at("stop").addEventListener("click", () => running?.abort());
at("clear").addEventListener("click", clear);
at("key").addEventListener("change", connect);
for (const name of ["chat", "race"]) at(`tab-${name}`).addEventListener("click", () => choose(name));
document.querySelector("nav").addEventListener("keydown", (event) => {
  if (!["ArrowLeft", "ArrowRight"].includes(event.key)) return;
  choose(view === "chat" ? "race" : "chat");
  at(`tab-${view}`).focus();
});
// On a small screen the answer needs the room.
if (matchMedia("(max-width: 40rem)").matches) at("settings").open = false;
listen();
connect();
