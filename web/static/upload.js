// Uploads a dataset with progress; the REST API takes the file, so page and scripts share one path.
"use strict";

(() => {
  const form = document.getElementById("upload");
  const file = document.getElementById("file");
  const name = document.getElementById("name");
  const drop = document.getElementById("drop");
  const start = document.getElementById("upload-start");
  const abort = document.getElementById("upload-abort");
  const state = document.getElementById("upload-state");
  const bar = document.getElementById("upload-progress");
  const text = document.getElementById("upload-text");
  const problem = document.getElementById("upload-problem");
  const problemText = document.getElementById("upload-problem-text");
  let request = null;

  function bytes(count) {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let size = count;
    let unit = 0;
    for (; size >= 1024 && unit < units.length - 1; unit += 1) size /= 1024;
    return `${unit ? size.toFixed(1) : size} ${units[unit]}`;
  }

  function setBusy(busy) {
    start.disabled = busy;
    file.disabled = busy;
    name.disabled = busy;
    abort.hidden = !busy;
    state.hidden = !busy;
  }

  function fail(message) {
    setBusy(false);
    problemText.textContent = message;
    problem.hidden = false;
  }

  function failWith(reply, status) {
    try {
      const error = JSON.parse(reply);
      fail([error.place ? `${error.place}: ${error.detail}` : error.detail, error.remedy].filter(Boolean).join(" "));
    } catch {
      fail(`The server answered with status ${status}. Try again; if it stays so, see the server's log.`);
    }
  }

  function send() {
    const chosen = file.files[0];
    const limit = Number(form.dataset.limit);
    problem.hidden = true;
    if (chosen.size > limit) return fail(`${chosen.name}: ${bytes(chosen.size)} is above the limit of ${bytes(limit)}.`);
    const body = new FormData();
    body.append("name", name.value.trim() || chosen.name);
    body.append("file", chosen);
    request = new XMLHttpRequest();
    request.open("POST", "/api/v1/datasets");
    request.setRequestHeader("X-CSRF-Token", document.querySelector("meta[name=csrf-token]").content);
    request.setRequestHeader("Accept", "application/json");
    const begun = performance.now();
    request.upload.addEventListener("progress", (event) => {
      if (!event.lengthComputable) return;
      bar.value = event.loaded / event.total;
      const speed = event.loaded / Math.max(0.001, (performance.now() - begun) / 1000);
      text.textContent = event.loaded < event.total
        ? `${bytes(event.loaded)} of ${bytes(event.total)} · ${bytes(speed)}/s`
        : "Arrived; the server is putting it away.";
    });
    request.addEventListener("load", () => {
      const done = request;
      request = null;
      if (done.status === 201 || done.status === 200 || done.status === 202) location.assign(`/datasets/${JSON.parse(done.responseText).id}`);
      else failWith(done.responseText, done.status);
    });
    request.addEventListener("error", () => {
      request = null;
      fail("The connection broke before the file had arrived. Nothing was kept; upload it again.");
    });
    request.addEventListener("abort", () => {
      request = null;
      setBusy(false);
      file.focus();
    });
    setBusy(true);
    bar.value = 0;
    text.textContent = "Starting";
    request.send(body);
    abort.focus();
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (!request && file.files.length) send();
  });
  abort.addEventListener("click", () => request && request.abort());
  addEventListener("beforeunload", (event) => request && event.preventDefault());

  for (const type of ["dragenter", "dragover"]) {
    drop.addEventListener(type, (event) => {
      event.preventDefault();
      drop.classList.add("drop-over");
    });
  }
  for (const type of ["dragleave", "drop"]) drop.addEventListener(type, () => drop.classList.remove("drop-over"));
  drop.addEventListener("drop", (event) => {
    event.preventDefault();
    if (request || !event.dataTransfer.files.length) return;
    file.files = event.dataTransfer.files;
    start.focus();
  });
})();
