#!/bin/sh
# HTTP with curl: the served model, then a streamed completion in a conversation.
set -eu
url=${1:-http://127.0.0.1:8000}
token=${RINGSERVE_TOKEN:-none}

curl --fail --silent --show-error --header "Authorization: Bearer $token" "$url/v1/models"
echo
model=$(curl --fail --silent --header "Authorization: Bearer $token" "$url/v1/models" | sed 's/.*"id":"\([^"]*\)".*/\1/')
curl --fail --silent --show-error --no-buffer "$url/v1/completions" \
  --header "Authorization: Bearer $token" --header "Content-Type: application/json" \
  --data "{\"model\": \"$model\", \"prompt\": \"Once upon a time\", \"max_tokens\": 8, \"stream\": true, \"conversation_id\": \"curl-example\"}"
