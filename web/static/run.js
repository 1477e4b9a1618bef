// The run page: one event stream feeds the curve and the numbers; anything but a step makes the page fetch its summary again.
"use strict";

(() => {
  const id = document.getElementById("run").dataset.run;
  const api = `/api/v1/runs/${id}`;
  const connection = document.getElementById("connection");
  const curve = new LossCurve(
    document.getElementById("curve"),
    document.getElementById("curve-note"),
    document.getElementById("curve-text"),
    document.getElementById("curve-gap"),
  );
  const zoom = new CurveZoom(curve, document.getElementById("curve-zoom"), document.getElementById("curve-range"), `${api}/metrics`);
  const LONGEST_WAIT_SECONDS = 30;
  // Of a burst of events only the last needs a new summary.
  const REFRESH_MILLISECONDS = 500;
  // The server ends every stream after a quarter of an hour; a gap this short is not worth a word.
  const SILENT_RETRIES = 1;
  const FINAL_STATES = new Set(["succeeded", "failed", "cancelled"]);
  let source = null;
  let attempt = 0;
  let lastEventId = null;
  let retries = 0;
  let retry = null;
  let countdown = null;
  let refresh = null;
  let lastNews = new Date(performance.timeOrigin); // the page itself is the first news

  const isTerminal = () => document.getElementById("run-summary").dataset.terminal === "yes";

  // ---- numbers ----
  function setLive(name, text) {
    for (const element of document.querySelectorAll(`[data-live="${name}"]`)) element.textContent = text;
  }

  function duration(seconds) {
    if (!Number.isFinite(seconds)) return "unknown";
    const whole = Math.max(0, Math.round(seconds));
    const hours = Math.floor(whole / 3600);
    const minutes = Math.floor((whole % 3600) / 60);
    const pad = (value) => String(value).padStart(2, "0");
    if (hours) return `${hours} h ${pad(minutes)} min`;
    return minutes ? `${minutes} min ${pad(whole % 60)} s` : `${whole} s`;
  }

  function showStep(event) {
    setLive("step", `${event.step.toLocaleString("en")} of ${event.total_steps.toLocaleString("en")}`);
    setLive("eta", duration(event.eta_seconds));
    setLive("loss", Number.isFinite(event.loss) ? event.loss.toFixed(4) : "–");
    if (Number.isFinite(event.tokens_per_second)) setLive("speed", `${Math.round(event.tokens_per_second).toLocaleString("en")} tokens/s`);
    const bar = document.querySelector("#run-summary progress");
    if (bar && event.total_steps) bar.value = event.step / event.total_steps;
  }

  function refreshSoon() {
    if (refresh) return;
    refresh = setTimeout(() => {
      refresh = null;
      document.body.dispatchEvent(new Event("lohan:refresh"));
    }, REFRESH_MILLISECONDS);
  }

  // ---- metrics ----
  async function loadMetrics() {
    for (;;) {
      const reply = await fetch(`${api}/metrics?after_step=${curve.lastStep}`, { headers: { Accept: "application/json" } });
      if (!reply.ok) throw new Error(`metrics: ${reply.status}`);
      lastNews = new Date();
      const before = curve.lastStep;
      const part = await reply.json();
      lastEventId ??= part.last_event_id;
      for (const point of part.data) {
        attempt = Math.max(attempt, point.attempt);
        curve.add(point.step, point.loss);
      }
      if (curve.lastStep === before) break;
    }
    if (!curve.lastStep) document.getElementById("curve-note").textContent = isTerminal() ? "This run made no step." : "The curve begins with the first step.";
  }

  // What earlier attempts said of steps behind the one that this attempt goes on from holds no longer.
  function beginAttempt(number, resumedStep) {
    if (number <= attempt) return;
    attempt = number;
    curve.keepUntil(resumedStep);
    if (!curve.zoom) zoom.showWhole();
  }

  function onStep(event) {
    beginAttempt(event.attempt, event.step - 1);
    curve.add(event.step, event.loss);
    showStep(event);
    log.poll();
  }

  // ---- the stream ----
  function connect() {
    clearTimeout(retry);
    clearInterval(countdown);
    if (source || document.hidden || isTerminal()) return;
    source = new EventSource(lastEventId ? `${api}/events?last_event_id=${lastEventId}` : `${api}/events`);
    source.addEventListener("open", () => {
      retries = 0;
      connection.hidden = true;
      refreshSoon();
    });
    source.addEventListener("error", () => {
      disconnect();
      reconnectLater();
    });
    source.addEventListener("step", (message) => {
      const event = heard(message);
      if (event) onStep(event);
    });
    for (const type of ["started", "phase", "evaluation", "plan_corrected", "warning", "exit", "state"]) {
      source.addEventListener(type, (message) => {
        const event = heard(message);
        if (type === "started" && event) beginAttempt(event.attempt, event.resumed_step || 0);
        if (type === "state" && event && FINAL_STATES.has(event.state)) disconnect();
        refreshSoon();
        log.poll();
      });
    }
  }

  function heard(message) {
    try {
      const event = JSON.parse(message.data);
      lastEventId = message.lastEventId || lastEventId;
      if (Number.isFinite(event.time)) lastNews = new Date(event.time * 1000);
      return event;
    } catch {
      return null;
    }
  }

  function disconnect() {
    if (source) source.close();
    source = null;
  }

  // 1, 2, 4 … 30 s, and a random part, so that after a restart not every open page comes at once.
  function reconnectLater() {
    if (isTerminal() || document.hidden) return;
    const waitSeconds = Math.min(LONGEST_WAIT_SECONDS, 2 ** retries);
    retries += 1;
    let left = waitSeconds;
    const since = `What you see is from ${lastNews.toLocaleTimeString()}.`;
    const say = () => {
      connection.textContent = `Connection to the server lost. ${since} Trying again${left > 0 ? ` in ${left} s` : ""}.`;
      connection.hidden = false;
      left -= 1;
    };
    if (retries > SILENT_RETRIES) say();
    countdown = setInterval(() => retries > SILENT_RETRIES && say(), 1000);
    retry = setTimeout(connect, 1000 * (waitSeconds + Math.random() / 2));
  }

  // Browsers allow six connections to one server: a tab nobody looks at gives its own back.
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) {
      disconnect();
      clearTimeout(retry);
      clearInterval(countdown);
    } else {
      connect();
      log.poll();
    }
  });

  document.addEventListener("htmx:afterSwap", (event) => {
    if (event.detail.target.id !== "run-summary" || !isTerminal()) return;
    disconnect();
    connection.hidden = true;
    loadMetrics().catch(() => {});
    log.poll();
  });

  // ---- log ----
  const log = new LogTail(document.getElementById("log"), document.getElementById("log-state"), `${api}/log`);
  log.poll();
  setInterval(() => {
    if (!document.hidden && !isTerminal()) log.poll();
  }, 4000);

  // The curve first: it says behind which event the stream has to begin.
  loadMetrics()
    .catch(() => {
      document.getElementById("curve-note").textContent = "The curve could not be loaded. Reload the page to try again.";
    })
    .finally(connect);
})();
