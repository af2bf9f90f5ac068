// Runs before Perfetto's UI, which greets its makers' site and looks for its developers' tools. Here it
// stays on its own path of its own server. The server's Content-Security-Policy would refuse the same,
// but with a complaint in the console for each.
"use strict";
{
  const base = location.pathname.replace(/[^/]*$/, "");
  const asked = window.fetch;
  const OURS = ["/vizviewer_info", "/localtrace", "/file_info"];  // asked for at the root
  window.fetch = (resource, options) => {
    const url = new URL(resource?.url ?? resource, location.href);
    if (OURS.includes(url.pathname)) return asked(base + url.pathname.slice(1), options);
    if (/^https?:/.test(url.protocol) && (url.origin !== location.origin || !url.pathname.startsWith(base)))
      return Promise.reject(new TypeError("offline"));
    return asked(resource, options);
  };
  window.EventSource = class { close() {} };  // its developers' live reload
  const replace = (prototype, name, change) => {
    const old = Object.getOwnPropertyDescriptor(prototype, name);
    Object.defineProperty(prototype, name, { ...old, set(value) { old.set.call(this, change(this, value)); } });
  };
  replace(HTMLScriptElement.prototype, "src", (_, value) =>
    new URL(value, location.href).origin === location.origin ? value : base + "nothing.js");
  replace(HTMLMetaElement.prototype, "content", (element, value) =>
    element.httpEquiv === "Content-Security-Policy" ? "default-src * data: blob: 'unsafe-inline' 'unsafe-eval'" : value);
}
