{{/* Names and labels. All take the root, or (list root component). */}}

{{- define "tandem.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $release := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- default $release .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{- define "tandem.component" -}}
{{- printf "%s-%s" (include "tandem.fullname" (first .)) (last .) -}}
{{- end }}

{{/* The pod labels that never change: the selectors of Services and policies. */}}
{{- define "tandem.selector" -}}
app.kubernetes.io/name: tandem
app.kubernetes.io/instance: {{ (first .).Release.Name }}
app.kubernetes.io/component: {{ last . }}
{{- end }}

{{/* Labels of pods. None changes with the chart's version, because a changed label restarts all pods. */}}
{{- define "tandem.podLabels" -}}
{{ include "tandem.selector" . }}
app.kubernetes.io/part-of: tandem
{{- with (first .).Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "tandem.labels" -}}
{{- $root := first . -}}
{{ include "tandem.podLabels" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "tandem.image" -}}
{{- $image := .Values.image -}}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else -}}
{{ $image.repository }}:{{ default .Chart.AppVersion $image.tag }}
{{- end -}}
{{- end }}

{{- define "tandem.nodeImage" -}}
{{- if eq .Values.engine "vllm" -}}{{ .Values.vllm.image }}{{- else -}}{{ include "tandem.image" . }}{{- end -}}
{{- end }}

{{- define "tandem.secretName" -}}
{{- default (include "tandem.fullname" .) .Values.auth.existingSecret -}}
{{- end }}

{{/* Entry of the Secret with API keys; empty where clients need none. */}}
{{- define "tandem.apiKeysEntry" -}}
{{- if .Values.auth.existingSecret -}}
{{ .Values.auth.apiKeysEntry }}
{{- else if .Values.auth.apiKeys -}}
api-keys
{{- end -}}
{{- end }}

{{/* "true" if the cluster has this version or a later one: (list root "1.21"). */}}
{{- define "tandem.since" -}}
{{- if semverCompare (printf ">=%s-0" (last .)) (first .).Capabilities.KubeVersion.Version }}true{{ end -}}
{{- end }}
