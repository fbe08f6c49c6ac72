// One message of the model: its answer as tokens, and its reasoning and tool calls folded above and below it.

import { Answer } from "./tokens.js";

const decoder = new TextDecoder("utf-8");
const textOf = (tokens) => decoder.decode(new Uint8Array(tokens.flatMap(({ token }) => token.bytes ?? [])));

/* [start, end] of tokens whose text fits; null: none do. Blanks around a text may have been left out of it. */
function findRun(tokens, fits) {
  for (let start = 0; start < tokens.length; start += 1) {
    for (let end = tokens.length; end > start; end -= 1) if (fits(textOf(tokens.slice(start, end)))) return [start, end];
  }
  return null;
}

function folded(title) {
  const details = document.createElement("details");
  const summary = document.createElement("summary");
  summary.textContent = title;
  details.append(summary);
  return { details, summary };
}

/* Arguments as a person reads them; what is no JSON yet stays as it is. */
function readable(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

/* A call stays folded: its line holds the beginning of its arguments, and the field for its result stands under it. */
class ToolCall {
  constructor(id, name) {
    this.id = id;
    this.name = name;
    this.arguments = "";
    this.result = null; // the field for what the tool returned
    this.element = document.createElement("div");
    this.element.className = "part call";
    const { details, summary } = folded(`Tool call: ${name}`);
    this.details = details;
    this.preview = document.createElement("code");
    this.pre = document.createElement("pre");
    summary.append(" ", this.preview);
    details.append(this.pre);
    this.element.append(details);
  }

  add(text) {
    this.arguments += text;
    this.preview.textContent = this.arguments;
    this.pre.textContent = readable(this.arguments);
  }

  askForResult(onSubmit) {
    const form = document.createElement("form");
    this.result = document.createElement("input");
    this.result.setAttribute("aria-label", `Result of ${this.name}`);
    this.result.placeholder = "what the tool returns";
    const button = document.createElement("button");
    button.textContent = "Return";
    form.className = "result";
    form.append(this.result, button);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      onSubmit();
    });
    this.element.append(form);
  }

  /* Folds the call: what it returned stands under its arguments. */
  showResult() {
    const title = document.createElement("p");
    title.className = "quiet";
    title.textContent = "Result";
    const pre = document.createElement("pre");
    pre.textContent = readable(this.result.value);
    this.result.closest("form").remove();
    this.details.append(title, pre);
    this.details.open = false;
  }

  get document() {
    return { id: this.id, type: "function", function: { name: this.name, arguments: this.arguments } };
  }
}

/* Tokens are shown where their text went. Marks such as <think> are part of no text and are not shown. */
export class Message {
  constructor(container, element) {
    this.container = container;
    this.answer = new Answer(element);
    this.reasoning = null;
    this.calls = [];
    this.pending = []; // tokens whose text has not arrived
    this.count = 0;
  }

  get text() {
    return this.answer.text;
  }

  get isEmpty() {
    return !this.text && !this.reasoning && !this.calls.length;
  }

  /* The message as it goes back to the server. */
  get document() {
    const fields = { role: "assistant", content: this.text };
    if (this.reasoning) fields.reasoning_content = this.reasoning.text;
    if (this.calls.length) fields.tool_calls = this.calls.map((call) => call.document);
    return fields;
  }

  addChunk(chunk) {
    this.count += chunk.tokens.length;
    this.pending.push(...chunk.tokens.map((token) => ({ token, fromDraft: chunk.fromDraft })));
    if (chunk.reasoning) this.#show(this.#reasoningPart(), chunk.reasoning);
    if (chunk.content) this.#show(this.answer, chunk.content);
    for (const delta of chunk.toolCalls) this.#addCall(delta);
  }

  #reasoningPart() {
    if (!this.reasoning) {
      const { details } = folded("Reasoning");
      details.className = "part reasoning";
      const element = document.createElement("div");
      element.className = "answer";
      element.tabIndex = 0;
      element.setAttribute("aria-label", "Reasoning; the arrow keys describe each token");
      details.append(element);
      this.answer.element.before(details);
      this.reasoning = new Answer(element);
    }
    return this.reasoning;
  }

  #show(part, text) {
    const run = findRun(this.pending, (spelled) => spelled === text)
      ?? findRun(this.pending, (spelled) => spelled.trim() === text.trim());
    if (run) for (const { token, fromDraft } of this.pending.slice(...run)) part.add(token, fromDraft);
    else part.addText(text);
    this.pending = run ? this.pending.slice(run[1]) : [];
  }

  #addCall(delta) {
    this.pending = [];
    if (delta.id) {
      const call = new ToolCall(delta.id, delta.function.name);
      this.calls.push(call);
      this.container.append(call.element);
    }
    this.calls[delta.index]?.add(delta.function?.arguments ?? "");
  }
}
