"""The viewer: a run's pages over the runs package, rendered here, read-only, for a live run's server and for a folder.

    browser ─► Guard (view key, Host, Origin, CSP) ─► create_viewer's routes ─► Page.show(viewed, request) ─► HTML

A page is added in three steps; nothing else knows the pages by name.

1. A module in `pages/` with a function and a record:

       async def show(viewed: ViewedRun, request: PageRequest) -> PageView:
           rollout = await viewed.run.look.rollout(request.path["rollout_id"])  # numbers come from `lightningrl_runs`
           return PageView("rollout.html", title=rollout.spec.id, rollout=rollout)

       PAGE = Page("rollouts/{rollout_id}", show)
       PAGE = Page("system", show, name="System", key="s")                    # one of the navigation

2. Its line in `PAGES` (pages/__init__.py), in the order of the navigation.
3. A template in `templates/` that extends `base.html`. It has `url("rollouts", step=3)` for links within the run, the
   filters of `templates.py` (`number`, `signed`, `plain`, `percent`, `duration`, `size`, `count`, `clean`, `short`,
   `preview`), and the macros of `parts.html` (`bar`, `badge`, `stat`, `empty`) and `charts.html`. Policies write
   hostile text: autoescape is on, never `|safe`, and text of a model goes through `|clean`. What is dear to compute:
   `await viewed.cache.get(key, make)`.

What a browser may do is said in the markup, so that keyboard and mouse are one:
- `data-key="t"` on a link or button: the key presses it, and `?` lists it by its text or `aria-label`.
- `data-row` on an element with a link `data-open` (Enter) and one `data-peek` (Space) in it: j and k go through them.
- `<div id="live" data-live>` is fetched anew when the run has news (`app.py`); nothing more is expected of a page
  without `data-live`.
- CSP is `default-src 'self'`: no `style="…"`, no `<script>` or `onclick` in a page. Bars are SVG with attributes;
  colours are classes.

Errors: raise a LightningError, and its sentence is the page (UnknownRecord: 404).
"""
