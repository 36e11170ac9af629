{{/* Rejects combinations of values that contradict each other. */}}
{{- define "tandem.check" -}}
{{- $removed := dict
  "discovery.mode" "routers find nodes by DNS, through the headless Services; leave it out"
  "serviceAccount" "routers need no permission in the cluster; leave it out, or name an existing account in router.serviceAccountName"
-}}
{{- range $path, $instead := $removed -}}
{{- $value := $.Values -}}
{{- range splitList "." $path }}{{ $value = get (default dict $value) . }}{{ end -}}
{{- if $value -}}
{{- fail (printf "%s was removed: %s" $path $instead) -}}
{{- end -}}
{{- end -}}
{{- $model := .Values.model -}}
{{- if and $model.init.image (eq $model.volume.type "none") -}}
{{- fail "model.init.image is set and model.volume.type is none: set model.volume.type to a volume that the init container fills, such as emptyDir" -}}
{{- end -}}
{{- if and (eq $model.volume.type "emptyDir") (not $model.init.image) -}}
{{- fail "model.volume.type is emptyDir, which is empty at first: set model.init.image to an image that writes the model to it" -}}
{{- end -}}
{{- if and (eq $model.volume.type "hostPath") (not $model.volume.hostPath) -}}
{{- fail "model.volume.type is hostPath: set model.volume.hostPath to the directory of the hosts that has the models" -}}
{{- end -}}
{{- if and (eq .Values.engine "vllm") (not .Values.vllm.image) -}}
{{- fail "engine is vllm and vllm.image is empty: build deploy/docker/Dockerfile.vllm, and set vllm.image to the image" -}}
{{- end -}}
{{- if and (eq .Values.engine "vllm") .Values.simulation.enabled -}}
{{- fail "engine is vllm and simulation.enabled is true: choose one" -}}
{{- end -}}
{{- if and .Values.vllm.args (ne .Values.engine "vllm") -}}
{{- fail "vllm.args are vLLM's flags: set engine to vllm" -}}
{{- end -}}
{{- $auth := .Values.auth -}}
{{- if and $auth.existingSecret (or $auth.clusterKey $auth.apiKeys) -}}
{{- fail "auth.existingSecret is set and has the keys: leave out auth.clusterKey and auth.apiKeys, and name the entry of API keys in auth.apiKeysEntry" -}}
{{- end -}}
{{- if and $auth.apiKeysEntry (not $auth.existingSecret) -}}
{{- fail "auth.apiKeysEntry is an entry of auth.existingSecret, which is empty: set auth.existingSecret, or set auth.apiKeys instead" -}}
{{- end -}}
{{- if and .Values.router.keyLimits (not (include "tandem.apiKeysEntry" .)) -}}
{{- fail "router.keyLimits limits API keys, and there are none: set auth.apiKeys, or auth.existingSecret and auth.apiKeysEntry" -}}
{{- end -}}
{{- range $component := list "prefill" "decode" "router" -}}
{{- with (index $.Values $component).autoscaling -}}
{{- if and .enabled (gt (int .minReplicas) (int .maxReplicas)) -}}
{{- fail (printf "%s.autoscaling.minReplicas is more than maxReplicas" $component) -}}
{{- end -}}
{{- if and .enabled (not .metrics) (not .cpuUtilization) -}}
{{- fail (printf "%s.autoscaling.metrics is empty: set at least one metric to scale by" $component) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $name := include "tandem.fullname" . -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) -}}
{{- fail (printf "the names of Services would begin with %s, which is not valid in DNS: set fullnameOverride to lower-case letters, digits and dashes, beginning with a letter" $name) -}}
{{- end -}}
{{- range splitList "," .Values.transfer.backend -}}
{{- if has . (list "shm" "cuda_ipc") -}}
{{- fail (printf "transfer.backend names %s, which moves KV within one host, and pods share no memory: use tcp, or nixl for GPUs" .) -}}
{{- end -}}
{{- if not (has . (list "auto" "tcp" "ucx" "nixl" "nccl" "mooncake")) -}}
{{- fail (printf "transfer.backend names %s, which the chart does not know: use tcp, ucx, nixl, nccl or mooncake, or set --transfer-backend in nodes.args" .) -}}
{{- end -}}
{{- end -}}
{{- range $role := list "prefill" "decode" -}}
{{- $node := index $.Values $role -}}
{{- if and $node.gpus (not $node.resources) -}}
{{- fail (printf "%s.gpus is set and %s.resources is empty: set requests and limits of CPU and memory for your model; memory must also cover nodes.sharedMemorySize and the KV tier of the host" $role $role) -}}
{{- end -}}
{{- $ports := list (int $node.ports.http) (int $node.ports.engine) (int $node.ports.bootstrap) -}}
{{- if lt (uniq $ports | len) 3 -}}
{{- fail (printf "%s.ports has the same port twice: http, engine and bootstrap must differ" $role) -}}
{{- end -}}
{{- if and $.Values.simulation.enabled (index $.Values $role).gpus -}}
{{- fail (printf "simulation.enabled and %s.gpus are set: a simulated node runs on the CPU; set gpus to 0, and set the speed of the GPUs in simulation.profile" $role) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.rdma.enabled .Values.rdma.hostNetwork -}}
{{- $taken := list -}}
{{- range .Values.decode.ports }}{{ $taken = append $taken (int .) }}{{ end -}}
{{- range $name, $port := .Values.prefill.ports -}}
{{- if has (int $port) $taken -}}
{{- fail (printf "rdma.hostNetwork is set, so prefill and decode share the ports of hosts: prefill.ports.%s is also in decode.ports; use a different port" $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and .Values.monitoring.podMonitor.enabled .Values.networkPolicy.enabled (not .Values.networkPolicy.metricsFrom) -}}
{{- fail "monitoring.podMonitor is enabled and networkPolicy blocks Prometheus: set networkPolicy.metricsFrom to the namespace of Prometheus" -}}
{{- end -}}
{{- with .Values.router.httpRoute -}}
{{- if and .enabled (not .parentRefs) -}}
{{- fail "router.httpRoute.parentRefs is empty: name at least one Gateway" -}}
{{- end -}}
{{- end -}}
{{- with .Values.networkPolicy.transferPorts -}}
{{- if gt (int .from) (int .to) -}}
{{- fail "networkPolicy.transferPorts.from is greater than networkPolicy.transferPorts.to" -}}
{{- end -}}
{{- end -}}
{{- end }}
