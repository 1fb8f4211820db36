// Names the part of a picture that is under the pointer, tapped, or reached by the keyboard.
(() => {
  "use strict";
  const tip = document.getElementById("tip");
  const reach = 24; // how far from a mark the pointer may be, in pixels
  let current = null;

  function hide() {
    if (current) current.classList.remove("on");
    current = null;
    tip.textContent = "";
  }

  function show(mark) {
    if (mark === current) return;
    hide();
    current = mark;
    mark.classList.add("on");
    tip.textContent = mark.dataset.said;
    const at = mark.getBoundingClientRect(), box = tip.getBoundingClientRect();
    const left = Math.min(Math.max((at.left + at.right - box.width) / 2, 8), innerWidth - box.width - 8);
    const above = at.top - box.height - 8;
    tip.style.transform = `translate(${Math.max(left, 8)}px, ${above > 4 ? above : at.bottom + 8}px)`;
  }

  for (const picture of document.querySelectorAll(".picture")) {
    const marks = [...picture.querySelectorAll(".m")];
    if (!marks.length) continue;
    for (const mark of marks) {
      const title = mark.querySelector("title");
      mark.dataset.said = title.textContent;
      title.remove(); // the browser would show it a second time
    }
    const tops = marks.map((mark) => mark.getBoundingClientRect().top);
    const stride = Math.max(tops.findIndex((top) => Math.abs(top - tops[0]) > 1), 1); // marks of a row

    const point = (event) => {
      let nearest = null, least = reach;
      for (const mark of marks) {
        const box = mark.getBoundingClientRect();
        const away = Math.hypot(
          Math.max(box.left - event.clientX, event.clientX - box.right, 0),
          Math.max(box.top - event.clientY, event.clientY - box.bottom, 0),
        );
        if (away < least) [nearest, least] = [mark, away];
      }
      if (nearest) show(nearest);
      else hide();
    };
    picture.addEventListener("pointermove", point);
    picture.addEventListener("pointerdown", point);
    picture.addEventListener("pointerleave", (event) => {
      if (event.pointerType === "mouse") hide();
    });
    picture.addEventListener("focus", () => {
      if (picture.matches(":focus-visible") && !marks.includes(current)) show(marks[0]);
    });
    picture.addEventListener("blur", hide);
    picture.addEventListener("keydown", (event) => {
      const here = marks.indexOf(current), last = marks.length - 1;
      const next = {
        ArrowRight: here + 1, ArrowLeft: here - 1, ArrowDown: here + stride, ArrowUp: here - stride,
        PageDown: here + 10 * stride, PageUp: here - 10 * stride, Home: 0, End: last,
      }[event.key];
      if (next === undefined) return;
      event.preventDefault();
      show(marks[Math.min(Math.max(next, 0), last)]);
    });
  }
  document.addEventListener("keydown", (event) => event.key === "Escape" && hide());
  document.addEventListener("pointerdown", (event) => event.target.closest(".picture") || hide());
  // A tap focuses a picture too: only what the keyboard reached keeps its tip.
  addEventListener("scroll", () => document.querySelector(".picture:focus-visible") || hide(), { passive: true });
})();
