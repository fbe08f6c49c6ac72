// An answer made of tokens: their colours, and what hovering, tapping or the arrow keys tell about each.

const tip = document.getElementById("tip");
const said = document.getElementById("said");

export class Answer {
  constructor(place) {
    this.place = place;
    this.decoder = new TextDecoder("utf-8");
    this.count = 0;
    this.text = "";
  }

  add(token, guessed) {
    // A character may be spread over several tokens: it is shown with the one that completes it.
    const shown = this.decoder.decode(new Uint8Array(token.bytes ?? []), { stream: true });
    const span = document.createElement("span");
    span.className = `t ${guessed ? "guessed" : "own"}`;
    span.textContent = shown;
    span.dataset.position = String(++this.count);
    span.dataset.chance = String(Math.exp(token.logprob));
    this.text += shown;
    this.place.append(span);
  }
}

export function described(span) {
  const chance = Number(span.dataset.chance) * 100;
  const shown = chance >= 99.95 ? "100" : chance >= 10 ? chance.toFixed(1) : chance.toPrecision(2);
  const origin = span.classList.contains("guessed") ? "guessed and accepted" : "the model's own";
  return `token ${span.dataset.position}, ${origin}, probability ${shown} %`;
}

function show(span) {
  unmark();
  span.classList.add("marked");
  tip.textContent = described(span);
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
function walk(event) {
  const answer = event.target.closest?.(".answer");
  const steps = { ArrowRight: 1, ArrowLeft: -1 };
  if (event.key === "Escape") hide();
  if (!answer || !(event.key in steps)) return;
  const spans = [...answer.querySelectorAll(".t")];
  const at = spans.findIndex((span) => span.classList.contains("marked"));
  const next = spans[Math.min(Math.max(0, at + steps[event.key]), spans.length - 1)];
  if (!next) return;
  event.preventDefault();
  show(next);
  next.scrollIntoView({ block: "nearest" });
  said.textContent = `“${next.textContent.trim() || "blank"}”: ${described(next)}`;
}

export function listen() {
  const onto = (event) => {
    const span = event.target.closest?.(".t[data-position]");
    if (span) show(span);
    else hide();
  };
  document.addEventListener("pointerover", onto);
  document.addEventListener("click", onto);
  document.addEventListener("keydown", walk);
  document.addEventListener("scroll", hide, true);
}
