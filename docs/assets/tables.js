// A table that is wider than a phone scrolls by keys, too.
document$.subscribe(() =>
  requestAnimationFrame(() => {
    for (const box of document.querySelectorAll(".md-typeset__scrollwrap")) box.tabIndex = 0
  }),
)
