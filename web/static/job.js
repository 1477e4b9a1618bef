// The page of a run that makes no steps: its summary asks for itself, its log and events follow.
"use strict";

(() => {
  const id = document.getElementById("run").dataset.run;
  const log = new LogTail(document.getElementById("log"), document.getElementById("log-state"), `/api/v1/runs/${id}/log`);
  log.poll();
  document.addEventListener("htmx:afterSwap", (event) => {
    if (event.detail.target.id !== "run-summary") return;
    log.poll();
    document.body.dispatchEvent(new Event("lohan:events"));
  });
})();
