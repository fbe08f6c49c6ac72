// An answer as tokens: their colours, and what hovering, tapping or the arrow keys show about each.

const tip = document.getElementById("tip");
const announcement = document.getElementById("announcement");

export class Answer {
  constructor(element) {
    this.element = element;
    this.decoder = new TextDecoder("utf-8");
    this.tokens = []; // as the server sent them
    this.text = "";
  }

  get count() {
    return this.tokens.length;
  }

  addChunk(chunk) {
    for (const token of chunk.tokens) this.add(token, chunk.fromDraft);
  }

  /* Text whose tokens are not known. */
  addText(text) {
    this.text += text;
    this.element.append(text);
  }

  add(token, fromDraft) {
    // A character can be spread over several tokens: it is shown with the last of them.
    const text = this.decoder.decode(new Uint8Array(token.bytes ?? []), { stream: true });
    const span = document.createElement("span");
    span.className = `t ${fromDraft ? "accepted" : "target"}`;
    span.textContent = text;
    this.tokens.push(token);
    span.dataset.position = String(this.count);
    span.dataset.probability = String(Math.exp(token.logprob));
    this.text += text;
    this.element.append(span);
  }
}

export function describe(span) {
  const percent = Number(span.dataset.probability) * 100;
  const probability = percent >= 99.95 ? "100" : percent >= 10 ? percent.toFixed(1) : percent.toPrecision(2);
  const origin = span.classList.contains("accepted") ? "accepted draft token" : "token of the target";
  return `token ${span.dataset.position}, ${origin}, probability ${probability} %`;
}

function show(span) {
  unmark();
  span.classList.add("marked");
  tip.textContent = describe(span);
  tip.hidden = false;
  const box = span.getBoundingClientRect();
  const left = Math.min(Math.max(8, box.left), innerWidth - tip.offsetWidth - 8);
  const above = box.top - tip.offsetHeight - 6;
  tip.style.left = `${left}px`;
  tip.style.top = `${above > 4 ? above : box.bottom + 6}px`;
}

function unmark() {
  for (const span of document.querySelectorAll(".t.marked")) span.classList.remove("marked");
}

function hide() {
  unmark();
  tip.hidden = true;
}

/* Arrow keys go from token to token inside the answer that has the focus. */
function onKeyDown(event) {
  const answer = event.target.closest?.(".answer");
  const moves = { ArrowRight: 1, ArrowLeft: -1 };
  if (event.key === "Escape") hide();
  if (!answer || !(event.key in moves)) return;
  const spans = [...answer.querySelectorAll(".t")];
  const index = spans.findIndex((span) => span.classList.contains("marked"));
  const next = spans[Math.min(Math.max(0, index + moves[event.key]), spans.length - 1)];
  if (!next) return;
  event.preventDefault();
  show(next);
  next.scrollIntoView({ block: "nearest" });
  announcement.textContent = `“${next.textContent.trim() || "blank"}”: ${describe(next)}`;
}

export function addTokenListeners() {
  const onPointer = (event) => {
    const span = event.target.closest?.(".t[data-position]");
    if (span) show(span);
    else hide();
  };
  document.addEventListener("pointerover", onPointer);
  document.addEventListener("click", onPointer);
  document.addEventListener("keydown", onKeyDown);
  document.addEventListener("scroll", hide, true);
}
