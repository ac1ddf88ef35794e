// Page of the HTTP contract: every path with its fields, as /openapi.json describes them.

import { $, element, on, token, told } from "./base.js";

/** Write what a schema takes in words. */
function words(schema) {
  if (schema.anyOf && !schema.properties) return [...new Set(schema.anyOf.map(words))].join(" or ");
  if ("const" in schema) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(", ");
  if (schema.type === "array") return `list of ${words(schema.items ?? {})}`;
  if (schema.type === "object" && schema.properties) {
    return `object (${Object.entries(schema.properties)
      .map(([name, each]) => `${name}: ${words(each)}`)
      .join("; ")})`;
  }
  const bounds = "minimum" in schema ? ` ${schema.minimum} to ${schema.maximum}` : "";
  return (schema.type ?? "any value") + bounds;
}

function fields(schema) {
  const rows = Object.entries(schema.properties ?? {}).map(([name, each]) => {
    const told = each.anyOf?.[0].description ?? each.description ?? "";
    const kind = [schema.required?.includes(name) ? "required" : "", words(each), told];
    return element(
      "tr",
      {},
      element("td", {}, element("code", {}, name)),
      element("td", {}, kind.filter(Boolean).join(", ").replace(/ or null/, "")),
    );
  });
  return rows.length ? [element("table", {}, ...rows)] : [];
}

function section(path, method, operation) {
  const answer = Object.entries(operation.responses["200"].content)[0];
  const body = operation.requestBody?.content["application/json"].schema;
  return element(
    "section",
    {},
    element("h2", {}, element("code", {}, `${method.toUpperCase()} ${path}`)),
    element("p", {}, operation.summary),
    ...(body ? fields(body) : []),
    element("p", { class: "hint" }, `It answers with ${answer[0]}${answer[1].schema.properties ? ":" : "."}`),
    ...fields(answer[1].schema),
  );
}

async function show() {
  try {
    const described = await told("/openapi.json");
    $("version").textContent = described.info.version;
    $("state").textContent = "Paths of this gateway, with the fields that each takes.";
    $("state").className = "";
    $("login").hidden = true;
    const paths = Object.entries(described.paths).flatMap(([path, methods]) =>
      Object.entries(methods).map(([method, operation]) => section(path, method, operation)),
    );
    $("paths").replaceChildren(...paths);
  } catch (error) {
    $("login").hidden = error.status !== 401;
    $("state").textContent = error.message;
    $("state").className = "bad";
  }
}

on("login", "submit", () => {
  token.value = $("token").value;
  sessionStorage.setItem("token", token.value);
  show();
});
show();
