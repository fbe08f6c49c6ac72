// Tokens per second, acceptance rate, tokens per step and draft tokens per step of the current answer.

const WINDOW = 2000; // milliseconds of the live speed
const NAMES = ["speed", "acceptance", "tau", "k"];
const elements = Object.fromEntries(NAMES.map((id) => [id, document.getElementById(id)]));

export class Gauges {
  constructor() {
    this.arrivals = []; // [time, tokens] of the chunks in the window
    this.firstTime = null;
    this.lastTime = null;
    this.firstTokens = 0; // of the first chunk
    this.tokens = this.accepted = this.drafted = this.steps = 0;
    this.recentDraftLengths = [];
  }

  add(chunk) {
    const now = performance.now();
    const count = chunk.numTokens;
    if (this.firstTime === null) {
      this.firstTime = now;
      this.firstTokens = count;
    }
    this.lastTime = now;
    this.tokens += count;
    if (chunk.fromDraft) this.accepted += count;
    if (chunk.numDraftTokens !== null) {
      this.steps += 1;
      this.drafted += chunk.numDraftTokens;
      this.recentDraftLengths = [...this.recentDraftLengths.slice(-7), chunk.numDraftTokens];
    }
    this.arrivals.push([now, count]);
    while (this.arrivals[0][0] < now - WINDOW) this.arrivals.shift();
    this.show();
  }

  /* From the first chunk on, so that the prefill does not count. */
  get seconds() {
    return this.firstTime === null ? 0 : (this.lastTime - this.firstTime) / 1000;
  }

  /* The tokens that arrived in these seconds: those of the first chunk did not. */
  get timedTokens() {
    return this.tokens - this.firstTokens;
  }

  get speed() {
    return this.seconds > 0 ? this.timedTokens / this.seconds : 0;
  }

  get liveSpeed() {
    const seconds = (this.arrivals.at(-1)[0] - this.arrivals[0][0]) / 1000;
    const count = this.arrivals.slice(1).reduce((sum, [, tokens]) => sum + tokens, 0);
    return seconds > 0 ? count / seconds : 0;
  }

  get tokensPerStep() {
    return this.steps ? this.tokens / this.steps : 0;
  }

  get acceptance() {
    return this.drafted ? this.accepted / this.drafted : null;
  }

  show() {
    elements.speed.textContent = this.liveSpeed ? this.liveSpeed.toFixed(1) : "–";
    elements.acceptance.textContent = this.acceptance === null ? "–" : `${Math.round(100 * this.acceptance)} %`;
    elements.tau.textContent = this.tokensPerStep ? this.tokensPerStep.toFixed(2) : "–";
    const k = this.recentDraftLengths.reduce((sum, length) => sum + length, 0) / this.recentDraftLengths.length;
    elements.k.textContent = Number.isNaN(k) ? "–" : Number.isInteger(k) ? String(k) : k.toFixed(1);
  }

  /* The speed of the whole answer replaces the live speed. */
  showTotals() {
    if (!this.tokens) return;
    this.show();
    elements.speed.textContent = this.speed.toFixed(1);
  }

  get summary() {
    return this.describe(this.speed);
  }

  /* speed: of this answer, or of several runs of it. Some engines do not report their steps. */
  describe(speed) {
    const parts = [`${this.tokens} tokens`, `${speed.toFixed(1)} tokens/s`];
    if (this.steps) {
      const percent = Math.round(100 * this.acceptance);
      parts.push(this.drafted ? `${percent} % of draft tokens accepted` : "no draft tokens");
      parts.push(`${this.tokensPerStep.toFixed(2)} tokens per step`);
    } else if (this.accepted) parts.push(`${this.accepted} of them from the draft`);
    return parts.join(", ");
  }
}
