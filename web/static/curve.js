// The loss curve: raw steps, a smoothed line, a gap and a mark where the loss was not a finite number.
"use strict";

// Weight of the newest step in the smoothed line: its memory is about 20 steps.
const CURVE_SMOOTHING = 0.1;

class LossCurve {
  constructor(container, note, text, gapLegend) {
    this.container = container;
    this.note = note;
    this.text = text;
    this.gapLegend = gapLegend;
    this.plot = null;
    this.clear();
    new ResizeObserver(() => this.resize()).observe(container);
    document.addEventListener("lohan:theme", () => this.repaint());
  }

  // A run that resumes does the steps behind `step` again: what the attempts before said of them is dropped.
  keepUntil(step) {
    const { steps, losses } = this;
    this.clear();
    for (let index = 0; index < steps.length && steps[index] <= step; index += 1) this.add(steps[index], losses[index]);
  }

  clear() {
    this.steps = [];
    this.losses = [];
    this.smoothed = [];
    this.average = 0;
    this.weight = 0;
    this.scheduled = false;
  }

  get lastStep() {
    return this.steps.length ? this.steps[this.steps.length - 1] : 0;
  }

  add(step, loss) {
    if (step <= this.lastStep) return;
    const value = Number.isFinite(loss) ? loss : null;
    this.steps.push(step);
    this.losses.push(value);
    if (value === null) {
      this.smoothed.push(null);
    } else {
      this.average += CURVE_SMOOTHING * (value - this.average);
      this.weight += CURVE_SMOOTHING * (1 - this.weight);
      this.smoothed.push(this.average / this.weight);
    }
    this.schedule();
  }

  // However fast steps arrive, the canvas is drawn once a frame.
  schedule() {
    if (this.scheduled) return;
    this.scheduled = true;
    requestAnimationFrame(() => {
      this.scheduled = false;
      this.draw();
    });
  }

  draw() {
    const hasPoints = this.steps.length > 0;
    this.note.hidden = hasPoints;
    this.gapLegend.classList.toggle("hidden", !this.losses.includes(null));
    if (!hasPoints) return;
    if (!this.plot) this.plot = new uPlot(this.options(), this.data(), this.container);
    else this.plot.setData(this.data());
    if (this.plot.cursor.idx === null || this.plot.cursor.idx === undefined) this.describe(this.steps.length - 1);
  }

  data() {
    return [this.steps, this.losses, this.smoothed];
  }

  describe(index) {
    const loss = this.losses[index];
    const shown = loss === null ? "not a finite number" : loss.toFixed(4);
    const smooth = this.smoothed[index];
    this.text.textContent = `Step ${this.steps[index].toLocaleString()}: loss ${shown}${smooth === null ? "" : `, smoothed ${smooth.toFixed(4)}`}`;
  }

  colour(name) {
    return getComputedStyle(document.querySelector(`.chart-${name}`)).color;
  }

  options() {
    const axis = {
      stroke: () => this.colour("axis"),
      grid: { stroke: () => this.colour("grid"), width: 1 },
      ticks: { show: false },
      font: "12px system-ui, sans-serif",
    };
    return {
      width: this.container.clientWidth,
      height: 300,
      scales: { x: { time: false }, y: { range: (_, low, high) => LossCurve.range(low, high) } },
      axes: [
        { ...axis, size: 34, space: 70, values: (_, marks) => marks.map((mark) => (Number.isInteger(mark) ? mark.toLocaleString() : "")) },
        { ...axis, size: 56 },
      ],
      series: [
        {},
        { label: "Each step", stroke: () => this.colour("raw"), width: 1.2, spanGaps: false, points: { show: this.steps.length < 3 } },
        { label: "Smoothed", stroke: () => this.colour("smooth"), width: 2.2, spanGaps: false, points: { show: false } },
      ],
      legend: { show: false },
      cursor: { y: false, points: { size: 7 } },
      hooks: {
        setCursor: [(plot) => this.describe(plot.cursor.idx ?? this.steps.length - 1)],
        draw: [(plot) => this.markGaps(plot)],
      },
    };
  }

  // A margin around the values; a flat line still gets a scale.
  static range(low, high) {
    if (low === null || high === null) return [0, 1];
    const margin = 0.06 * (high - low || Math.abs(high) || 1);
    return [low - margin, high + margin];
  }

  markGaps(plot) {
    const context = plot.ctx;
    const bottom = plot.bbox.top + plot.bbox.height - 10 * devicePixelRatio;
    const arm = 3.5 * devicePixelRatio;
    context.save();
    context.strokeStyle = this.colour("gap");
    context.lineWidth = 1.6 * devicePixelRatio;
    context.beginPath();
    this.losses.forEach((loss, index) => {
      if (loss !== null) return;
      const x = plot.valToPos(this.steps[index], "x", true);
      if (x < plot.bbox.left || x > plot.bbox.left + plot.bbox.width) return;
      context.moveTo(x - arm, bottom - arm);
      context.lineTo(x + arm, bottom + arm);
      context.moveTo(x + arm, bottom - arm);
      context.lineTo(x - arm, bottom + arm);
    });
    context.stroke();
    context.restore();
  }

  resize() {
    if (this.plot && this.container.clientWidth) this.plot.setSize({ width: this.container.clientWidth, height: 300 });
  }

  repaint() {
    if (this.plot) this.plot.redraw(false, true);
  }
}
