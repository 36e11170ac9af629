#!/usr/bin/env bash
# Thousands of cases that schemathesis makes of the OpenAPI document, against a running server: every
# answer must be as documented, and none a 500. Exits with schemathesis' own status.
#
#   pip install schemathesis
#   tests/clients/schemathesis_all.sh http://127.0.0.1:8000 [SECONDS]
#
# Without a URL it starts the app over a fake backend, which needs no model to be computed.
set -euo pipefail
cd "$(dirname "$0")/../.."
url=${1:-}
seconds=${2:-60}
export PYTHONPATH=$PWD/src:$PWD
if [ -z "$url" ]; then
  exec 3< <(exec python -m tests.clients.fake_server)
  server=$!
  trap 'kill $server' EXIT
  read -r url <&3
fi
checks=not_a_server_error,status_code_conformance,content_type_conformance
checks+=,response_schema_conformance,response_headers_conformance,unsupported_method
st run "$url/openapi.json" --phases examples,coverage,fuzzing,stateful --checks "$checks" \
  --max-examples 400 --max-time "$seconds" --request-timeout 20 --generation-allow-x00 true \
  --generation-database none --continue-on-failure --no-color
