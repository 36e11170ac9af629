{{/* Names and labels. All take the root, or (list root component). */}}

{{- define "tandem.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $release := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- default $release .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{- define "tandem.component" -}}
{{- printf "%s-%s" (include "tandem.fullname" (first .)) (last .) -}}
{{- end }}

{{/* What never changes of a pod's labels: the selectors of Services, policies and routers. */}}
{{- define "tandem.selector" -}}
app.kubernetes.io/name: tandem
app.kubernetes.io/instance: {{ (first .).Release.Name }}
app.kubernetes.io/component: {{ last . }}
{{- end }}

{{- define "tandem.selectorFlag" -}}
{{- printf "app.kubernetes.io/name=tandem,app.kubernetes.io/instance=%s,app.kubernetes.io/component=%s" (first .).Release.Name (last .) -}}
{{- end }}

{{/* Of pods: nothing that changes with the chart alone, which would start them all anew. */}}
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

{{- define "tandem.serviceAccountName" -}}
{{- default (include "tandem.component" (list . "router")) .Values.serviceAccount.name -}}
{{- end }}

{{/* "true" where the cluster is of this version or later: (list root "1.21"). */}}
{{- define "tandem.since" -}}
{{- if semverCompare (printf ">=%s-0" (last .)) (first .).Capabilities.KubeVersion.Version }}true{{ end -}}
{{- end }}
