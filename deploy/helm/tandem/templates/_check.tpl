{{/* Refuses values that are right each by itself and wrong together. */}}
{{- define "tandem.check" -}}
{{- $model := .Values.model -}}
{{- if and $model.init.image (eq $model.volume.type "none") -}}
{{- fail "model.init.image is set and model.volume.type is none: give the init container a volume to fill, such as emptyDir" -}}
{{- end -}}
{{- if and (eq $model.volume.type "emptyDir") (not $model.init.image) -}}
{{- fail "model.volume.type is emptyDir, which begins empty: set model.init.image to what fills it" -}}
{{- end -}}
{{- if and (eq $model.volume.type "hostPath") (not $model.volume.hostPath) -}}
{{- fail "model.volume.type is hostPath: set model.volume.hostPath to the directory of the hosts that has the models" -}}
{{- end -}}
{{- if and (eq .Values.engine "vllm") (not .Values.vllm.image) -}}
{{- fail "engine is vllm and vllm.image is empty: build deploy/docker/Dockerfile.vllm, and name the image" -}}
{{- end -}}
{{- if and (eq .Values.engine "vllm") .Values.simulation.enabled -}}
{{- fail "engine is vllm and simulation.enabled is true: choose one" -}}
{{- end -}}
{{- if and .Values.vllm.args (ne .Values.engine "vllm") -}}
{{- fail "vllm.args are vLLM's flags: set engine to vllm" -}}
{{- end -}}
{{- $auth := .Values.auth -}}
{{- if and $auth.existingSecret (or $auth.clusterKey $auth.apiKeys) -}}
{{- fail "auth.existingSecret has the keys: leave out auth.clusterKey and auth.apiKeys, and name the entry of API keys in auth.apiKeysEntry" -}}
{{- end -}}
{{- if and $auth.apiKeysEntry (not $auth.existingSecret) -}}
{{- fail "auth.apiKeysEntry is an entry of auth.existingSecret: name that, or give the keys in auth.apiKeys" -}}
{{- end -}}
{{- if and .Values.router.keyLimits (not (include "tandem.apiKeysEntry" .)) -}}
{{- fail "router.keyLimits says what API keys may use, and there are none: give auth.apiKeys, or auth.existingSecret and auth.apiKeysEntry" -}}
{{- end -}}
{{- range $component := list "prefill" "decode" "router" -}}
{{- with (index $.Values $component).autoscaling -}}
{{- if and .enabled (gt (int .minReplicas) (int .maxReplicas)) -}}
{{- fail (printf "%s.autoscaling.minReplicas is more than maxReplicas" $component) -}}
{{- end -}}
{{- if and .enabled (not .metrics) (not .cpuUtilization) -}}
{{- fail (printf "%s.autoscaling.metrics is empty: name what the number of pods should follow" $component) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $role := list "prefill" "decode" -}}
{{- if and $.Values.simulation.enabled (index $.Values $role).gpus -}}
{{- fail (printf "simulation.enabled and %s.gpus: a simulated node runs on the CPU, and simulation.profile says how fast its GPUs would be" $role) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.rdma.enabled .Values.rdma.hostNetwork -}}
{{- $taken := list -}}
{{- range .Values.decode.ports }}{{ $taken = append $taken (int .) }}{{ end -}}
{{- range $name, $port := .Values.prefill.ports -}}
{{- if has (int $port) $taken -}}
{{- fail (printf "rdma.hostNetwork: prefill and decode share the hosts' ports, and prefill.ports.%s is one of decode's" $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and .Values.monitoring.podMonitor.enabled .Values.networkPolicy.enabled (not .Values.networkPolicy.metricsFrom) -}}
{{- fail "monitoring.podMonitor has Prometheus ask nodes, and networkPolicy lets nobody in who does: name Prometheus' namespace in networkPolicy.metricsFrom" -}}
{{- end -}}
{{- with .Values.networkPolicy.transferPorts -}}
{{- if gt (int .from) (int .to) -}}
{{- fail "networkPolicy.transferPorts.from is after networkPolicy.transferPorts.to" -}}
{{- end -}}
{{- end -}}
{{- end }}
