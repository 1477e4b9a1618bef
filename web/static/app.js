// What every page has: theme, menu, dialogs, forms that post once, local times, and polling that rests while nobody looks.
"use strict";

(() => {
  const root = document.documentElement;

  function isDark() {
    return root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  }

  function labelTheme() {
    for (const button of document.querySelectorAll("[data-theme-toggle] span")) {
      button.textContent = isDark() ? "Light mode" : "Dark mode";
    }
  }

  // A cookie and not localStorage: the server writes the theme into the page, so that no wrong one flashes up first.
  function toggleTheme() {
    root.dataset.theme = isDark() ? "light" : "dark";
    document.cookie = `lohan_theme=${root.dataset.theme}; Path=/; Max-Age=31536000; SameSite=Lax`;
    labelTheme();
    document.dispatchEvent(new Event("lohan:theme"));
  }

  function toggleMenu(button) {
    const open = document.getElementById("side").classList.toggle("nav-open");
    button.setAttribute("aria-expanded", String(open));
  }

  // A part that was asked for again may know of more than the page around it, which has the dialogs.
  function openDialog(id) {
    const dialog = document.getElementById(id);
    if (dialog) dialog.showModal();
    else location.reload();
  }

  document.addEventListener("click", (event) => {
    const target = event.target instanceof Element ? event.target : null;
    if (!target) return;
    if (target.closest("[data-theme-toggle]")) toggleTheme();
    const menu = target.closest("[data-nav-toggle]");
    if (menu) toggleMenu(menu);
    const opener = target.closest("[data-dialog]");
    if (opener) openDialog(opener.dataset.dialog);
    if (target.closest("[data-close]") || target.nodeName === "DIALOG") target.closest("dialog").close();
    const copier = target.closest("[data-copy]");
    if (copier) copyText(copier);
  });

  // Browsers offer the clipboard only over https and on localhost; elsewhere the text is selected, ready for Ctrl+C.
  async function copyText(button) {
    const source = document.getElementById(button.dataset.copy);
    getSelection().selectAllChildren(source);
    if (!navigator.clipboard) return;
    await navigator.clipboard.writeText(source.textContent);
    button.querySelector("span").textContent = "Copied";
  }

  // A second click must not post a second time; the back button brings the form back usable.
  document.addEventListener("submit", (event) => {
    if (event.defaultPrevented || event.target.method !== "post") return;
    for (const button of event.target.querySelectorAll("button[type=submit]")) button.disabled = true;
  });
  addEventListener("pageshow", (event) => {
    if (!event.persisted) return;
    for (const button of document.querySelectorAll("form button[type=submit]")) button.disabled = false;
  });

  const minutes = { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" };
  const thisYear = new Intl.DateTimeFormat(undefined, minutes);
  const otherYear = new Intl.DateTimeFormat(undefined, { ...minutes, year: "numeric" });
  const seconds = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
  function localTimes(scope) {
    for (const element of scope.querySelectorAll("time[data-local], time[data-clock]")) {
      const moment = new Date(element.dateTime);
      if (Number.isNaN(moment.getTime())) continue;
      const isClock = element.hasAttribute("data-clock");
      const format = isClock ? seconds : moment.getFullYear() === new Date().getFullYear() ? thisYear : otherYear;
      element.title = isClock ? otherYear.format(moment) : element.textContent;
      element.textContent = format.format(moment);
      element.removeAttribute(isClock ? "data-clock" : "data-local");
    }
  }

  // ---- polling ----
  const connection = document.getElementById("connection");
  let lastReply = new Date(performance.timeOrigin); // the page itself is the first reply

  function isPoll(element) {
    return (element.getAttribute("hx-trigger") || "").includes("every");
  }

  document.addEventListener("htmx:beforeRequest", (event) => {
    if (document.hidden && isPoll(event.detail.elt)) event.preventDefault();
  });
  document.addEventListener("htmx:afterRequest", (event) => {
    if (!connection || event.detail.successful) {
      const date = event.detail.xhr.getResponseHeader("Date");
      lastReply = date ? new Date(date) : lastReply;
      if (connection) connection.hidden = true;
      return;
    }
    if (!isPoll(event.detail.elt)) return;
    connection.textContent = `No answer from the server. What you see is from ${lastReply.toLocaleTimeString()}. Trying again.`;
    connection.hidden = false;
  });
  document.addEventListener("htmx:afterSettle", () => localTimes(document));

  // What a reader opened stays open when its newer self takes its place: leaving a field asks for the plan again.
  let opened = [];
  document.addEventListener("htmx:beforeSwap", () => {
    opened = [...document.querySelectorAll("details[id][open]")].map((details) => details.id);
  });
  document.addEventListener("htmx:afterSwap", () => {
    for (const id of opened) document.getElementById(id)?.setAttribute("open", "");
  });

  labelTheme();
  localTimes(document);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    labelTheme();
    document.dispatchEvent(new Event("lohan:theme"));
  });
})();
