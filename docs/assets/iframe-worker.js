// Browsers start no Worker for a page that was opened as a file; there the search's script runs in a hidden frame.
// The theme looks for the name IFrameWorker.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.answer = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.loaded = new Promise((done) => this.frame.addEventListener("load", done, { once: true }));
      this.frame.srcdoc =
        `<script>postMessage = (data) => frameElement.answer(data)</script><script src="${url}"></script>`;
      document.body.append(this.frame);
    }
    postMessage(data) {
      this.loaded.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
