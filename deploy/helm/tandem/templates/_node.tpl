{{/* Parts of prefill and decode pods. All take (list root role). */}}

{{- define "tandem.nodeArgs" -}}
{{- $root := first . -}}{{- $role := last . -}}{{- $values := $root.Values -}}{{- $node := index $values $role -}}
- {{ $role }}
- {{ printf "--host=%s" $values.listenHost | quote }}
- --port={{ int $node.ports.http }}
- --engine-port={{ int $node.ports.engine }}
- --bootstrap-port={{ int $node.ports.bootstrap }}
- --zone=$(TANDEM_ZONE)
- --drain-timeout-s={{ int $node.drainTimeoutSeconds }}
- --log-level={{ $values.logLevel }}
- --log-format=json
- --transfer-backend={{ $values.transfer.backend }}
- --verify-kv={{ $values.transfer.verifyKv }}
{{- with $values.transfer.interface }}
- {{ printf "--transfer-interface=%s" . | quote }}
{{- end }}
{{- with $values.transfer.device }}
- {{ printf "--transfer-device=%s" . | quote }}
{{- end }}
{{- with $values.model.path }}
- {{ printf "--model=%s" . | quote }}
{{- end }}
{{- with $values.model.name }}
- {{ printf "--served-model-name=%s" . | quote }}
{{- end }}
{{- if gt (int $node.gpus) 1 }}
- --device=cuda
- --tp={{ int $node.gpus }}
{{- else if eq (int $node.gpus) 1 }}
- --device=cuda:0
{{- end }}
{{- if eq $values.engine "vllm" }}
- --engine=vllm
{{- end }}
{{- if $values.simulation.enabled }}
- --engine=simulated
- --sim-kv={{ $values.simulation.kv }}
{{- if $values.simulation.profile }}
- --sim-profile=/etc/tandem/simulation/profile.json
{{- end }}
{{- end }}
{{- if $values.auth.insecure }}
- --insecure
{{- end }}
{{- if and (include "tandem.apiKeysEntry" $root) (not $values.auth.insecure) }}
- --api-key-file=/etc/tandem/keys/api-keys
{{- end }}
{{- range concat $values.nodes.args $node.args }}
- {{ . | quote }}
{{- end }}
{{- if and (eq $values.engine "vllm") $values.vllm.args }}
- "--"
{{- range $values.vllm.args }}
- {{ . | quote }}
{{- end }}
{{- end }}
{{- end }}

{{- define "tandem.nodeEnv" -}}
{{- $root := first . -}}{{- $node := index $root.Values (last .) -}}
{{ include "tandem.env" $root }}
- name: TANDEM_ZONE
  {{- if $node.zone }}
  value: {{ $node.zone | quote }}
  {{- else }}
  valueFrom:
    fieldRef:
      fieldPath: metadata.labels['topology.kubernetes.io/zone']
  {{- end }}
{{- if $root.Values.rdma.enabled }}
{{- range $name, $value := $root.Values.rdma.ucx }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- end }}
{{- with concat $root.Values.nodes.env $node.env }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* The user's resources, with GPUs and adapters in requests and limits, which must be equal. */}}
{{- define "tandem.nodeResources" -}}
{{- $values := (first .).Values -}}{{- $rdma := $values.rdma -}}{{- $node := index $values (last .) -}}
{{- $small := dict "requests" (dict "cpu" "2" "memory" "6Gi") "limits" (dict "memory" "8Gi") -}}
{{- $resources := default $small $node.resources -}}
{{- $disk := dict -}}
{{- $isDownloaded := and $values.model.path (eq $values.model.volume.type "none") (not $values.nodes.cacheVolume) -}}
{{- if and $isDownloaded (not (dig "limits" "ephemeral-storage" "" $resources)) }}{{ $disk = dict "ephemeral-storage" $values.nodes.cacheSize }}{{ end -}}
{{- $devices := dict -}}
{{- if $node.gpus }}{{ $_ := set $devices $node.gpuResource (int $node.gpus | toString) }}{{ end -}}
{{- if and $rdma.enabled $rdma.resource }}{{ $_ := set $devices $rdma.resource (int $rdma.count | toString) }}{{ end -}}
{{- range $kind := list "requests" "limits" }}
{{ $kind }}: {{- merge (dict) $devices (default dict (index $resources $kind)) (ternary $disk dict (eq $kind "requests")) | toYaml | nindent 2 }}
{{- end }}
{{- end }}

{{- define "tandem.nodePodSecurity" -}}
{{- if and .Values.rdma.enabled .Values.rdma.runAsRoot -}}
{{- $others := omit .Values.podSecurityContext "runAsNonRoot" "runAsGroup" "fsGroup" "fsGroupChangePolicy" -}}
{{- toYaml (set $others "runAsUser" 0) -}}
{{- else -}}
{{ include "tandem.podSecurity" . }}
{{- end }}
{{- end }}

{{/* RDMA adapters pin the memory that they write; the capability for it has no effect for users other than root. */}}
{{- define "tandem.nodeContainerSecurity" -}}
{{- $context := deepCopy .Values.securityContext -}}
{{- if and .Values.rdma.enabled .Values.rdma.runAsRoot -}}
{{- $capabilities := default dict $context.capabilities -}}
{{- $_ := set $capabilities "add" (append (default list $capabilities.add) "IPC_LOCK") -}}
{{- $_ := set $context "capabilities" $capabilities -}}
{{- end -}}
{{- toYaml $context -}}
{{- end }}

{{/* Mounts of a node, and of the init container that fills /models: (list root readOnly). */}}
{{- define "tandem.nodeMounts" -}}
- name: tmp
  mountPath: /tmp
- name: cache
  mountPath: /var/cache/tandem
{{- if ne (first .).Values.model.volume.type "none" }}
- name: models
  mountPath: /models
  readOnly: {{ last . }}
{{- end }}
{{- end }}

{{- define "tandem.modelsVolume" -}}
{{- $volume := .Values.model.volume -}}
{{- if eq $volume.type "pvc" }}
- name: models
  persistentVolumeClaim:
    claimName: {{ default (include "tandem.component" (list . "models")) $volume.existingClaim }}
{{- else if eq $volume.type "hostPath" }}
- name: models
  hostPath:
    path: {{ $volume.hostPath }}
    type: Directory
{{- else if eq $volume.type "emptyDir" }}
- name: models
  emptyDir: {{- if $volume.sizeLimit }}
    sizeLimit: {{ $volume.sizeLimit | quote }}
    {{- else }} {}{{ end }}
{{- end }}
{{- end }}
