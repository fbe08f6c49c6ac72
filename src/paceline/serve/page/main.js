// The page: a chat that shows which tokens come from the draft, and a race of one prompt without and with speculation.

import { listModels, streamChat } from "./api.js";
import { Gauges } from "./gauges.js";
import { addTokenListeners, Answer } from "./tokens.js";

const byId = (id) => document.getElementById(id);
const conversation = [];
let abortController = null; // of the running request
let view = "chat";
let model = null;

// --- request parameters ----------------------------------------------------------------------------------------------

function speculativeParams(speculate) {
  if (!speculate) return { method: "none", num_draft_tokens: 0 };
  const k = byId("num-draft-tokens").value;
  return { method: byId("method").value, num_draft_tokens: k === "auto" ? "auto" : Number(k) };
}

function requestParams(messages, speculate, temperature) {
  const maxTokens = Math.max(1, Math.round(Number(byId("max-tokens").value)) || 256);
  return { model, messages, temperature, max_tokens: maxTokens, speculative: speculativeParams(speculate) };
}

// --- generation ------------------------------------------------------------------------------------------------------

async function generate(params, element, onChunk = () => {}) {
  const answer = new Answer(element);
  const gauges = new Gauges();
  for await (const chunk of streamChat(params, byId("key").value, abortController.signal)) {
    for (const token of chunk.tokens) answer.add(token, chunk.fromDraft);
    if (chunk.tokens.length) gauges.add(chunk);
    onChunk(answer, gauges);
  }
  gauges.finish();
  return { answer, gauges };
}

function setRunning(running) {
  abortController = running ? new AbortController() : null;
  byId("send").disabled = running;
  byId("stop").hidden = !running;
  if (running) byId("stop").focus();
  else byId("prompt").focus();
}

function createElement(tag, className, text = "") {
  const element = document.createElement(tag);
  element.className = className;
  element.textContent = text;
  return element;
}

function errorText(error) {
  if (error.name === "AbortError") return "stopped";
  return error.message || "the connection was lost";
}

async function chat(prompt) {
  const log = byId("log");
  byId("hint").hidden = true;
  conversation.push({ role: "user", content: prompt });
  const message = createElement("div", "message assistant");
  const element = createElement("div", "answer");
  element.tabIndex = 0;
  element.setAttribute("aria-label", "Answer; the arrow keys describe each token");
  message.append(element);
  log.append(createElement("div", "message user", prompt), message);
  const scrollToEnd = () => { log.scrollTop = log.scrollHeight; };
  scrollToEnd();
  try {
    const temperature = Number(byId("temperature").value) || 0;
    const params = requestParams(conversation, byId("speculation").checked, temperature);
    const { answer, gauges } = await generate(params, element, scrollToEnd);
    message.append(createElement("p", "summary", gauges.summary));
    byId("announcement").textContent = `Answer: ${answer.text}`;
  } catch (error) {
    const stopped = error.name === "AbortError";
    message.append(createElement("p", stopped ? "summary" : "summary error", errorText(error)));
    byId("announcement").textContent = errorText(error);
  }
  conversation.push({ role: "assistant", content: element.textContent });
  scrollToEnd();
}

async function runLane(name, prompt, speculate) {
  const element = byId(`lane-${name}`);
  element.replaceChildren();
  const bar = byId(`lane-${name}-bar`);
  bar.value = 0;
  const params = requestParams([{ role: "user", content: prompt }], speculate, 0);
  const start = performance.now();
  const result = await generate(params, element, (answer, gauges) => {
    bar.value = answer.count / params.max_tokens;
    const seconds = ((performance.now() - start) / 1000).toFixed(1);
    byId(`lane-${name}-summary`).textContent = `${answer.count} tokens, ${gauges.steps} steps, ${seconds} s`;
  });
  bar.value = 1;
  byId(`lane-${name}-summary`).textContent = result.gauges.summary;
  return result;
}

async function race(prompt) {
  byId("result").textContent = "";
  for (const name of ["off", "on"]) {
    byId(`lane-${name}`).replaceChildren();
    byId(`lane-${name}-summary`).textContent = "";
    byId(`lane-${name}-bar`).value = 0;
  }
  try {
    const off = await runLane("off", prompt, false);
    const on = await runLane("on", prompt, true);
    const speedup = (on.gauges.speed / off.gauges.speed).toFixed(2);
    const equal = on.answer.text === off.answer.text;
    const output = equal ? "the same output" : "another output (two tokens were nearly equally likely)";
    byId("result").textContent = `${speedup}× speed, ${on.gauges.steps} steps instead of ${off.gauges.steps}; ${output}.`;
  } catch (error) {
    byId("result").textContent = errorText(error);
  }
}

async function submit(event) {
  event?.preventDefault();
  const prompt = byId("prompt").value.trim();
  if (!prompt || abortController) return;
  setRunning(true);
  if (view === "chat") byId("prompt").value = "";
  await (view === "chat" ? chat(prompt) : race(prompt));
  setRunning(false);
}

// --- views and settings ----------------------------------------------------------------------------------------------

function showView(name) {
  view = name;
  for (const other of ["chat", "race"]) {
    byId(other).hidden = other !== name;
    byId(`tab-${other}`).setAttribute("aria-selected", String(other === name));
    byId(`tab-${other}`).tabIndex = other === name ? 0 : -1;
  }
  byId("send").textContent = name === "chat" ? "Send" : "Race";
  for (const element of [byId("speculation").closest("label"), byId("clear")]) element.hidden = name === "race";
}

function fillSelect(select, values, selected) {
  select.replaceChildren(...values.map((value) => new Option(value, value, false, value === String(selected))));
}

async function connect() {
  try {
    const [first] = await listModels(byId("key").value);
    model = first.id;
    const details = first.x_paceline;
    const methods = details.methods.filter((method) => !["none", "prediction"].includes(method));
    fillSelect(byId("method"), methods, methods[0]);
    const draftLengths = ["auto", "1", "2", "3", "4", "6", "8", "12", "16"];
    fillSelect(byId("num-draft-tokens"), draftLengths, details.num_draft_tokens);
    byId("model").textContent = model;
  } catch (error) {
    byId("model").textContent = error.message || "the server cannot be reached";
  }
}

function clear() {
  conversation.length = 0;
  for (const message of byId("log").querySelectorAll(".message")) message.remove();
  byId("hint").hidden = false;
  byId("prompt").focus();
}

byId("composer").addEventListener("submit", submit);
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
});
byId("stop").addEventListener("click", () => abortController?.abort());
byId("clear").addEventListener("click", clear);
byId("key").addEventListener("change", connect);
for (const name of ["chat", "race"]) byId(`tab-${name}`).addEventListener("click", () => showView(name));
document.querySelector("nav").addEventListener("keydown", (event) => {
  if (!["ArrowLeft", "ArrowRight"].includes(event.key)) return;
  showView(view === "chat" ? "race" : "chat");
  byId(`tab-${view}`).focus();
});
// A small screen has no space for the settings beside an answer.
if (matchMedia("(max-width: 40rem)").matches) byId("settings").open = false;
addTokenListeners();
connect();
