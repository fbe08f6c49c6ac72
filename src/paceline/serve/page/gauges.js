// Tokens per second, share of guesses accepted, tokens a pass, guesses a pass: of the answer being written.

const WINDOW = 2000; // milliseconds the speed is taken over
const places = Object.fromEntries(["speed", "acceptance", "tau", "k"].map((id) => [id, document.getElementById(id)]));

export class Gauges {
  constructor() {
    this.times = [];
    this.first = null;
    this.last = null;
    this.tokens = this.accepted = this.drafted = this.rounds = 0;
    this.recent = [];
  }

  add(piece) {
    const now = performance.now();
    const count = piece.tokens.length;
    this.first ??= now;
    this.last = now;
    this.tokens += count;
    if (piece.guessed) this.accepted += count;
    if (piece.drafted !== null) {
      this.rounds += 1;
      this.drafted += piece.drafted;
      this.recent = [...this.recent.slice(-7), piece.drafted];
    }
    this.times.push([now, count]);
    while (this.times[0][0] < now - WINDOW) this.times.shift();
    this.show();
  }

  /* From the first piece on, so that reading the prompt does not count. */
  get speed() {
    const seconds = (this.last - this.first) / 1000;
    return seconds > 0 ? (this.tokens - 1) / seconds : 0;
  }

  get lately() {
    const span = (this.times.at(-1)[0] - this.times[0][0]) / 1000;
    const count = this.times.slice(1).reduce((sum, [, tokens]) => sum + tokens, 0);
    return span > 0 ? count / span : 0;
  }

  get tau() {
    return this.rounds ? this.tokens / this.rounds : 0;
  }

  get acceptance() {
    return this.drafted ? this.accepted / this.drafted : null;
  }

  show() {
    places.speed.textContent = this.lately ? this.lately.toFixed(1) : "–";
    places.acceptance.textContent = this.acceptance === null ? "–" : `${Math.round(100 * this.acceptance)} %`;
    places.tau.textContent = this.tau ? this.tau.toFixed(2) : "–";
    const k = this.recent.reduce((sum, each) => sum + each, 0) / (this.recent.length || 1);
    places.k.textContent = Number.isInteger(k) ? String(k) : k.toFixed(1);
  }

  /* The whole answer's speed takes the place of the last moment's. */
  finish() {
    if (this.tokens) places.speed.textContent = this.speed.toFixed(1);
  }

  get words() {
    const accepted = this.acceptance === null ? "nothing guessed" : `${Math.round(100 * this.acceptance)} % accepted`;
    return `${this.tokens} tokens, ${this.speed.toFixed(1)} tokens/s, ${accepted}, ${this.tau.toFixed(2)} tokens a pass`;
  }
}
