// Shows the API's description. Sends the token that the dashboard keeps for this tab (api.js there), if it has one.

const headers = () => {
  const token = sessionStorage.getItem("headrace-token");
  return token ? { Authorization: `Bearer ${token}` } : {};
};

fetch("/openapi.json", { headers: headers() }).then(async (answer) => {
  if (!answer.ok) {
    document.getElementById("reference").textContent =
      "The API needs its token: open the dashboard in this tab (headrace open prints a link), then come back to /docs.";
    return;
  }
  SwaggerUIBundle({
    spec: await answer.json(),
    dom_id: "#reference",
    validatorUrl: null,
    requestInterceptor: (request) => Object.assign(request, { headers: { ...request.headers, ...headers() } }),
  });
});
