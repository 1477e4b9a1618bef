// The tail of a run's log: plain text, without terminal colours, bounded in lines and in their length.
"use strict";

class LogTail {
  constructor(element, state, address) {
    this.element = element;
    this.state = state;
    this.address = address;
    this.offset = null;
    this.lines = [];
    this.busy = false;
    this.again = false;
    this.element.textContent = "";
  }

  // One request at a time; a poll asked for meanwhile follows it.
  async poll() {
    if (this.busy) {
      this.again = true;
      return;
    }
    this.busy = true;
    try {
      await this.fetchAll();
    } catch {
      this.state.textContent = "The log could not be read just now.";
    }
    this.busy = false;
    if (this.again) {
      this.again = false;
      setTimeout(() => this.poll(), 1000);
    }
  }

  async fetchAll() {
    for (;;) {
      const query = this.offset === null ? "" : `?offset=${this.offset}`;
      const reply = await fetch(this.address + query, { headers: { Accept: "application/json" } });
      if (!reply.ok) throw new Error(`log: ${reply.status}`);
      const part = await reply.json();
      const moved = part.next_offset !== this.offset;
      // The log was started anew.
      if (this.offset !== null && part.next_offset < this.offset) this.lines = [];
      this.offset = part.next_offset;
      this.append(part.text);
      this.state.textContent = this.lines.length ? "" : "Nothing has been written yet.";
      if (!moved || part.next_offset >= part.size) return;
    }
  }

  append(text) {
    if (!text) return;
    const follows = this.element.scrollTop + this.element.clientHeight >= this.element.scrollHeight - 24;
    for (const line of text.replace(/\n$/, "").split("\n")) this.lines.push(LogTail.clean(line));
    if (this.lines.length > LogTail.LINES) this.lines.splice(0, this.lines.length - LogTail.LINES);
    this.element.textContent = this.lines.join("\n");
    if (follows) this.element.scrollTop = this.element.scrollHeight;
  }

  // The server sends plain text; what is left is made visible: characters that would hide or reorder others.
  static clean(line) {
    return line.replace(LogTail.HIDDEN, (character) => `\\u${character.charCodeAt(0).toString(16).padStart(4, "0")}`);
  }
}

LogTail.LINES = 2000;
LogTail.HIDDEN = /[\u061c\u200b\u200e\u200f\u202a-\u202e\u2060\u2066-\u2069\ufeff]/g;
