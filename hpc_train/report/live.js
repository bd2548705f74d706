// Asks for a newer page while somebody looks at this one, and keeps the place where it is read.
// The server puts the page's tag and the seconds between two questions here.
(() => {
  "use strict";
  const tag = "TAG", seconds = SECONDS, key = "hpc-train-place";
  const note = document.createElement("div");
  note.id = "live";
  note.setAttribute("role", "status");
  note.style.cssText = "position:fixed;right:.5rem;bottom:.5rem;padding:.2rem .6rem;" +
    "border-radius:.4rem;font:.8rem sans-serif;background:#1d2733;color:#fff";
  const made = new Date().toLocaleTimeString();
  const show = (text) => { note.textContent = text; note.hidden = !text; };
  show("");
  document.body.append(note);
  const all = (what) => [...document.querySelectorAll(what)];
  // What the reader has opened, scrolled and switched, beside what the page keeps by itself.
  const place = () => ({
    x: window.scrollX, y: window.scrollY,
    open: all("details").map((one) => one.open),
    across: all(".scroll").map((one) => one.scrollLeft),
    chosen: all("#legend input").map((one) => one.checked) });
  history.scrollRestoration = "manual";
  const restore = () => {
    let kept = null;
    try { kept = JSON.parse(sessionStorage.getItem(key)); } catch { /* none is kept */ }
    sessionStorage.removeItem(key);
    if (!kept) return;
    all("details").forEach((one, i) => { one.open = kept.open[i] ?? one.open; });
    all("#legend input").forEach((one, i) => { if (kept.chosen[i] === !one.checked) one.click(); });
    all(".scroll").forEach((one, i) => { one.scrollLeft = kept.across[i] ?? 0; });
    window.scrollTo({ left: kept.x, top: kept.y, behavior: "instant" });
  };
  if (document.readyState === "complete") restore();
  else window.addEventListener("load", restore);
  let asking = false;
  const ask = async () => {
    if (document.hidden || asking) return;
    asking = true;
    try {
      const answer = await fetch(location.pathname, {
        method: "HEAD", cache: "no-store", headers: { "If-None-Match": tag } });
      if (answer.ok) {
        sessionStorage.setItem(key, JSON.stringify(place()));
        location.reload();
        return;
      }
      show(answer.status === 304 ? "" : `no newer page since ${made}`);
    } catch {
      show(`not connected: this page is of ${made}`);
    } finally {
      asking = false;
    }
  };
  setInterval(ask, seconds * 1000);
  document.addEventListener("visibilitychange", ask);
})();
