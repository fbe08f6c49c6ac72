// The page: a chat that shows which tokens come from the draft, and a race of one prompt without and with speculation.

import { listModels } from "./api.js";
import { generate, requestParams } from "./generation.js";
import { race } from "./race.js";
import { addTokenListeners } from "./tokens.js";

const byId = (id) => document.getElementById(id);
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

function addMessages(prompt) {
  const message = createElement("div", "message assistant");
  const element = createElement("div", "answer");
  element.tabIndex = 0;
  element.setAttribute("aria-label", "Answer; the arrow keys describe each token");
  message.append(element);
  byId("log").append(createElement("div", "message user", prompt), message);
  return { message, element };
}

async function chat(prompt, signal) {
  const messages = conversation;
  const log = byId("log");
  byId("hint").hidden = true;
  const { message, element } = addMessages(prompt);
  const scrollToEnd = () => { log.scrollTop = log.scrollHeight; };
  scrollToEnd();
  messages.push({ role: "user", content: prompt });
  try {
    const temperature = Number(byId("temperature").value) || 0;
    const params = requestParams(model, messages, byId("speculation").checked, temperature);
    const { answer, gauges } = await generate(params, signal, element, scrollToEnd);
    message.append(createElement("p", "summary", gauges.summary));
    byId("announcement").textContent = `Answer: ${answer.text}`;
  } catch (error) {
    const stopped = error.name === "AbortError";
    message.append(createElement("p", stopped ? "summary" : "summary error", errorText(error)));
    byId("announcement").textContent = errorText(error);
  }
  // A question without an answer is not part of the next request: it may be what the server refused.
  if (element.textContent) messages.push({ role: "assistant", content: element.textContent });
  else messages.pop();
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
  setRunning(true);
  if (view === "chat") byId("prompt").value = "";
  await (view === "chat" ? chat : runRace)(prompt, abortController.signal);
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
