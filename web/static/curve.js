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
    this.zoom = null;
    this.onSelect = () => {};
    this.onDraw = () => {};
    this.clear();
    new ResizeObserver(() => this.resize()).observe(container);
    document.addEventListener("lohan:theme", () => this.repaint());
  }

  // A run that resumes does the steps behind `step` again: what the attempts before said of them is dropped.
  keepUntil(step) {
    const { steps, losses } = this;
    this.clear();
    for (let index = 0; index < steps.length && steps[index] <= step; index += 1) this.add(steps[index], losses[index]);
    if (this.zoom && this.zoom.last > step) this.showWhole();
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
    LossCurve.append(this, step, loss);
    this.schedule();
  }

  // `lines` has the steps, their losses, and what the smoothed line has come to.
  static append(lines, step, loss) {
    const value = Number.isFinite(loss) ? loss : null;
    lines.steps.push(step);
    lines.losses.push(value);
    if (value === null) {
      lines.smoothed.push(null);
    } else {
      lines.average += CURVE_SMOOTHING * (value - lines.average);
      lines.weight += CURVE_SMOOTHING * (1 - lines.weight);
      lines.smoothed.push(lines.average / lines.weight);
    }
  }

  // The steps from `first` to `last` alone, as the server gave them. New steps are kept for later and do not move the view.
  showRange(first, last, points) {
    this.zoom = { first, last, steps: [], losses: [], smoothed: [], average: 0, weight: 0 };
    for (const point of points) LossCurve.append(this.zoom, point.step, point.loss);
    this.schedule();
  }

  showWhole() {
    this.zoom = null;
    this.schedule();
  }

  get shown() {
    return this.zoom || this;
  }

  get range() {
    return this.zoom ? [this.zoom.first, this.zoom.last] : [this.steps[0] ?? 0, this.lastStep];
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
    const hasPoints = this.shown.steps.length > 0;
    this.note.hidden = hasPoints;
    this.onDraw(hasPoints);
    this.gapLegend.classList.toggle("hidden", !this.shown.losses.includes(null));
    if (!hasPoints) return;
    if (!this.plot) this.plot = new uPlot(this.options(), this.data(), this.container);
    else this.plot.setData(this.data());
    if (this.plot.cursor.idx === null || this.plot.cursor.idx === undefined) this.describe(this.shown.steps.length - 1);
  }

  data() {
    return [this.shown.steps, this.shown.losses, this.shown.smoothed];
  }

  describe(index) {
    const { steps, losses, smoothed } = this.shown;
    if (!(index in steps)) return;
    const shown = losses[index] === null ? "not a finite number" : losses[index].toFixed(4);
    const smooth = smoothed[index] === null ? "" : `, smoothed ${smoothed[index].toFixed(4)}`;
    this.text.textContent = `Step ${steps[index].toLocaleString()}: loss ${shown}${smooth}`;
  }

  // A stretch that was dragged over; one of no width was a click.
  select(plot) {
    const { left, width } = plot.select;
    plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    if (width < 1) return;
    const [first, last] = [left, left + width].map((position) => plot.posToVal(position, "x"));
    this.onSelect(Math.ceil(first), Math.floor(last));
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
      scales: { x: { time: false, range: (_, low, high) => this.rangeOfSteps(low, high) }, y: { range: (_, low, high) => LossCurve.range(low, high) } },
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
      cursor: {
        y: false,
        points: { size: 7 },
        drag: { x: true, y: false, setScale: false },
        bind: { dblclick: () => () => this.onSelect(null, null) },
      },
      hooks: {
        setCursor: [(plot) => this.describe(plot.cursor.idx ?? this.shown.steps.length - 1)],
        setSelect: [(plot) => this.select(plot)],
        draw: [(plot) => this.markGaps(plot)],
      },
    };
  }

  // A range that was asked for stays as it is, whatever arrives; one step alone still gets a scale.
  rangeOfSteps(low, high) {
    if (this.zoom) return [this.zoom.first, this.zoom.last];
    return low === null ? [0, 1] : [low, high > low ? high : low + 1];
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
    this.shown.losses.forEach((loss, index) => {
      if (loss !== null) return;
      const x = plot.valToPos(this.shown.steps[index], "x", true);
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
