// One answer: its request, its tokens on the page, its statistics.

import { streamChat } from "./api.js";
import { Gauges } from "./gauges.js";

const byId = (id) => document.getElementById(id);

function speculativeParams(speculate) {
  if (!speculate) return { method: "none", num_draft_tokens: 0 };
  const k = byId("num-draft-tokens").value;
  return { method: byId("method").value, num_draft_tokens: k === "auto" ? "auto" : Number(k) };
}

/* The functions of the settings, as the API takes them: a list of tools, or of functions alone. */
export function offeredTools() {
  const text = byId("tools").value.trim();
  if (!text) return {};
  let tools;
  try {
    tools = [JSON.parse(text)].flat();
  } catch {
    throw new Error("the tools of the settings are no JSON");
  }
  return { tools: tools.map((tool) => (tool.function ? tool : { type: "function", function: tool })) };
}

export function requestParams(model, messages, speculate, temperature) {
  const maxTokens = Math.max(1, Math.round(Number(byId("max-tokens").value)) || 256);
  return { model, messages, temperature, max_tokens: maxTokens, speculative: speculativeParams(speculate) };
}

/* Shows an answer as it arrives. Nothing that arrives after the abort is shown or counted. */
export async function generate(params, signal, answer, onChunk = () => {}) {
  const gauges = new Gauges();
  for await (const chunk of streamChat(params, byId("key").value, signal)) {
    signal.throwIfAborted();
    answer.addChunk(chunk);
    if (chunk.numTokens) gauges.add(chunk);
    onChunk(answer, gauges);
  }
  signal.throwIfAborted();
  gauges.showTotals();
  return { answer, gauges };
}
