// A stretch of the loss curve: dragged over with the mouse, or chosen by buttons; the server gives its steps, at most 2,000 of them.
"use strict";

class CurveZoom {
  constructor(curve, controls, text, url) {
    this.curve = curve;
    this.controls = controls;
    this.text = text;
    this.url = url;
    this.asked = 0;
    curve.onSelect = (first, last) => (first === null ? this.showWhole() : this.show(first, last));
    curve.onDraw = (hasPoints) => {
      controls.hidden = !hasPoints;
    };
    controls.addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (button) this.press(button.dataset.zoom);
    });
    this.update();
  }

  press(action) {
    const [first, last] = this.curve.range;
    const half = Math.max(1, Math.round((last - first) / 2));
    if (action === "in") this.show(first + Math.floor(half / 2), last - Math.floor(half / 2));
    if (action === "out") this.show(first - half, last + half);
    if (action === "earlier") this.shift(-half);
    if (action === "later") this.shift(half);
    if (action === "whole") this.showWhole();
  }

  // As wide as before, and not beyond the ends.
  shift(steps) {
    const [first, last] = this.curve.range;
    const [lowest, highest] = this.ends;
    const by = Math.max(lowest - first, Math.min(highest - last, steps));
    if (by) this.show(first + by, last + by);
  }

  get ends() {
    return [this.curve.steps[0] ?? 0, this.curve.lastStep];
  }

  // A range that is asked for while another is on its way takes its place.
  async show(from, to) {
    const [lowest, highest] = this.ends;
    const first = Math.max(lowest, from);
    const last = Math.min(highest, to);
    if (last <= first) return;
    if (first === lowest && last === highest) {
      this.showWhole();
      return;
    }
    const number = (this.asked += 1);
    try {
      const reply = await fetch(`${this.url}?after_step=${first - 1}&to_step=${last}`, { headers: { Accept: "application/json" } });
      if (!reply.ok) throw new Error(`metrics: ${reply.status}`);
      const found = await reply.json();
      if (number !== this.asked) return;
      this.curve.showRange(first, last, found.data);
      this.update(found);
    } catch {
      if (number === this.asked) this.text.textContent = "These steps could not be loaded. Try again.";
    }
  }

  showWhole() {
    this.asked += 1;
    this.curve.showWhole();
    this.update();
  }

  update(found) {
    const isZoomed = this.curve.zoom !== null;
    const [first, last] = this.curve.range;
    // The button that was pressed keeps the keyboard's focus: none is ever disabled.
    for (const button of this.controls.querySelectorAll("[data-zoom=out], [data-zoom=earlier], [data-zoom=later], [data-zoom=whole]")) {
      button.setAttribute("aria-disabled", String(!isZoomed));
    }
    if (!isZoomed) {
      this.text.textContent = "";
      return;
    }
    const which = found.down_sampled ? `${found.data.length.toLocaleString()} of ${found.total.toLocaleString()} steps` : "every step";
    this.text.textContent = `Steps ${first.toLocaleString()} to ${last.toLocaleString()}, ${which}.`;
  }
}
