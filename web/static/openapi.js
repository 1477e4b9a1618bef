// Starts the vendored Swagger UI; requests it sends carry the session's CSRF token.
"use strict";

SwaggerUIBundle({
  url: "/openapi.json",
  dom_id: "#openapi",
  presets: [SwaggerUIBundle.presets.apis],
  validatorUrl: null,
  docExpansion: "list",
  defaultModelsExpandDepth: 0,
  requestInterceptor: (request) => {
    if (!new URL(request.url, location.href).href.startsWith(location.origin)) return request;
    request.headers["X-CSRF-Token"] = document.querySelector("meta[name=csrf-token]").content;
    return request;
  },
});
