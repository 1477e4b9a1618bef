// An answer that grows: the events of the chat that the page shows, one stream, closed when it has ended or nobody looks.
"use strict";

(() => {
  const LONGEST_WAIT_SECONDS = 30;
  const FINAL_STATES = new Set(["succeeded", "failed", "cancelled"]);
  // As the server's `visible`: what hides or reorders other text is shown as an escape.
  const INVISIBLE = /[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u202a-\u202e\u2060\u2066-\u2069\ufeff]/g;
  let source = null;
  let chat = null;
  let text = "";
  let attempt = 0;
  let standing = "";
  let retries = 0;
  let retry = null;

  const talk = () => document.querySelector("[data-chat]");
  const escape = (character) => `\\u${character.charCodeAt(0).toString(16).padStart(4, "0")}`;

  function show() {
    const place = talk()?.querySelector("[data-answer]");
    // Before that, what there is of an answer is of an attempt that was lost.
    if (place && talk().dataset.over === "no" && talk().dataset.phase === "answering" && text) place.textContent = text.replace(INVISIBLE, escape);
  }

  function refresh() {
    document.body.dispatchEvent(new Event("lohan:chat"));
  }

  // From its first event on: what was said before the stream was opened comes too, and nothing is said twice.
  function connect() {
    clearTimeout(retry);
    const here = talk();
    const wanted = here && here.dataset.over === "no" ? here.dataset.chat : null;
    if (document.hidden || wanted === null) return disconnect();
    if (source && wanted === chat) return show();
    disconnect();
    chat = wanted;
    text = "";
    attempt = 0;
    standing = "";
    source = new EventSource(`/api/v1/runs/${chat}/events?last_event_id=0:0`);
    source.addEventListener("answer_part", (message) => hear(message, (event) => text + event.text));
    source.addEventListener("answer", (message) => hear(message, (event) => event.text));
    source.addEventListener("state", (message) => hear(message, null));
    source.addEventListener("error", () => {
      disconnect();
      retry = setTimeout(connect, 1000 * Math.min(LONGEST_WAIT_SECONDS, 2 ** retries));
      retries += 1;
    });
  }

  function hear(message, grown) {
    const event = JSON.parse(message.data);
    retries = 0;
    if (grown) {
      // Another attempt begins the answer anew.
      if (event.attempt > attempt) text = "";
      attempt = Math.max(attempt, event.attempt);
      text = grown(event);
      const bar = talk()?.querySelector("progress");
      if (bar && Number.isFinite(event.progress)) bar.value = event.progress;
      return show();
    }
    const now = `${event.state} ${event.phase} ${event.wanted} ${event.state_reason}`;
    if (FINAL_STATES.has(event.state)) disconnect();
    if (now !== standing) refresh();
    standing = now;
  }

  function disconnect() {
    if (source) source.close();
    source = null;
  }

  document.addEventListener("visibilitychange", connect);
  document.addEventListener("htmx:afterSwap", (event) => {
    if (!talk() && event.detail.target.id !== "chat") return;
    connect();
    // Whoever asked goes on writing where the answer has come.
    if (event.detail.target.id === "chat" && document.activeElement === document.body) {
      document.getElementById("chat-message")?.focus({ preventScroll: true });
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && event.target.id === "chat-message") event.target.form.requestSubmit();
  });

  connect();
})();
