// The page: a chat that shows which tokens come from the draft, and a race of one prompt without and with speculation.

import { listModels } from "./api.js";
import { generate, offeredTools, requestParams } from "./generation.js";
import { Message } from "./message.js";
import { race } from "./race.js";
import { addTokenListeners } from "./tokens.js";

const byId = (id) => document.getElementById(id);
const CHAT_ONLY = ["speculation", "clear", "temperature", "tools"]; // a race is greedy, and has no tools
let conversation = []; // "New chat" replaces it: a request that still runs keeps the old one
let abortController = null; // of the running request
let view = "chat";
let model = null;
let rounding = { dtype: "an unknown dtype", bound: 0 }; // what the server says that rounding can explain

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

function addMessage() {
  const container = createElement("div", "message assistant");
  const element = createElement("div", "answer");
  element.tabIndex = 0;
  element.setAttribute("aria-label", "Answer; the arrow keys describe each token");
  container.append(element);
  byId("log").append(container);
  return { container, message: new Message(container, element) };
}

function scrollToEnd() {
  byId("log").scrollTop = byId("log").scrollHeight;
}

/* What the tools have returned goes back once every call has a result. */
function askForResults(messages, calls) {
  const submit = () => {
    if (messages !== conversation || abortController) return;
    const results = calls.map((call) => call.result.value);
    const missing = results.findIndex((text) => !text.trim());
    if (missing >= 0) {
      calls[missing].result.focus();
      return;
    }
    const documents = calls.map((call, index) => ({ role: "tool", tool_call_id: call.id, content: results[index] }));
    for (const call of calls) call.showResult();
    run((signal) => respond(documents, signal));
  };
  for (const call of calls) call.askForResult(submit);
}

async function chat(prompt, signal) {
  byId("hint").hidden = true;
  byId("log").append(createElement("div", "message user", prompt));
  await respond([{ role: "user", content: prompt }], signal);
}

/* Sends new messages of the conversation and shows the answer. */
async function respond(added, signal) {
  const messages = conversation;
  const { container, message } = addMessage();
  scrollToEnd();
  messages.push(...added);
  try {
    const temperature = Number(byId("temperature").value) || 0;
    const params = requestParams(model, messages, byId("speculation").checked, temperature);
    const { gauges } = await generate({ ...params, ...offeredTools() }, signal, message, scrollToEnd);
    container.append(createElement("p", "summary", gauges.summary));
    byId("announcement").textContent = `Answer: ${message.text || message.calls.map((call) => call.name).join(", ")}`;
    if (message.calls.length) askForResults(messages, message.calls);
  } catch (error) {
    const stopped = error.name === "AbortError";
    container.append(createElement("p", stopped ? "summary" : "summary error", errorText(error)));
    byId("announcement").textContent = errorText(error);
  }
  // A question without an answer is not part of the next request: it may be what the server refused.
  if (message.isEmpty) messages.splice(-added.length);
  else messages.push(message.document);
  scrollToEnd();
}

async function runRace(prompt, signal) {
  try {
    await race(model, prompt, rounding, signal);
  } catch (error) {
    byId("result").textContent = errorText(error);
  }
}

async function submit(event) {
  event?.preventDefault();
  const prompt = byId("prompt").value.trim();
  if (!prompt || abortController) return;
  if (view === "chat") byId("prompt").value = "";
  await run((signal) => (view === "chat" ? chat : runRace)(prompt, signal));
}

async function run(work) {
  setRunning(true);
  await work(abortController.signal);
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
  for (const id of CHAT_ONLY) (byId(id).closest("label") ?? byId(id)).hidden = name === "race";
}

function fillSelect(select, values, selected) {
  select.replaceChildren(...values.map((value) => new Option(value, value, false, value === String(selected))));
}

async function connect() {
  try {
    const [first] = await listModels(byId("key").value);
    model = first.id;
    const details = first.x_paceline;
    rounding = { dtype: details.dtype, bound: details.near_tie_logprob };
    const methods = details.methods.filter((method) => !["none", "prediction"].includes(method));
    fillSelect(byId("method"), methods, methods[0]);
    const draftLengths = ["auto", "1", "2", "3", "4", "6", "8", "12", "16"];
    fillSelect(byId("num-draft-tokens"), draftLengths, details.num_draft_tokens);
    byId("model").textContent = model;
  } catch (error) {
    byId("model").textContent = error.message || "the server cannot be reached";
  }
}

function startNewChat() {
  abortController?.abort();
  conversation = [];
  for (const message of byId("log").querySelectorAll(".message")) message.remove();
  byId("hint").hidden = false;
  byId("prompt").focus();
}

byId("composer").addEventListener("submit", submit);
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
});
byId("stop").addEventListener("click", () => abortController?.abort());
byId("clear").addEventListener("click", startNewChat);
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
