// Fetches the OpenAPI document, asks for an API key if the service needs one, and shows the document.
"use strict";

const form = document.getElementById("key-form");
const input = document.getElementById("key");
const message = document.getElementById("message");

function withKey(headers, key) {
  return key ? { ...headers, Authorization: `Bearer ${key}` } : headers;
}

async function load(key) {
  const response = await fetch("openapi.json", { headers: withKey({}, key) });
  if (response.status === 401) {
    form.hidden = false;
    message.textContent = key ? "The key is not valid." : "";
    input.focus();
    return;
  }
  if (!response.ok) {
    throw new Error(`status ${response.status}`);
  }
  form.hidden = true;
  message.textContent = "";
  SwaggerUIBundle({
    spec: await response.json(),
    dom_id: "#swagger-ui",
    deepLinking: true,
    validatorUrl: null, // its default is a request to another host
    requestInterceptor: (request) => {
      request.headers = withKey(request.headers, key);
      return request;
    },
  });
}

function open(key) {
  load(key).catch((error) => {
    message.textContent = `The document could not be loaded: ${error.message}`;
  });
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  open(input.value.trim());
});
open("");
