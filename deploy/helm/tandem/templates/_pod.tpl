{{/* Parts that all pods have. */}}

{{- define "tandem.podSecurity" -}}
{{- toYaml .Values.podSecurityContext -}}
{{- end }}

{{- define "tandem.containerSecurity" -}}
{{- toYaml .Values.securityContext -}}
{{- end }}

{{/* Where a pod runs: (list root component values). */}}
{{- define "tandem.placement" -}}
{{- $root := index . 0 -}}{{- $component := index . 1 -}}{{- $values := index . 2 -}}
{{- with $root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with $values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.topologySpread.keys }}
topologySpreadConstraints:
  {{- range . }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: {{ $values.topologySpread.whenUnsatisfiable }}
    labelSelector:
      matchLabels: {{- include "tandem.selector" (list $root $component) | nindent 8 }}
  {{- end }}
{{- end }}
{{- end }}

{{/* Environment of all processes: the root. */}}
{{- define "tandem.env" -}}
- name: POD_IP
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
{{- if not .Values.auth.insecure }}
- name: TANDEM_CLUSTER_KEY
  valueFrom:
    secretKeyRef:
      name: {{ include "tandem.secretName" . }}
      key: {{ ternary .Values.auth.clusterKeyEntry "cluster-key" (not (empty .Values.auth.existingSecret)) }}
{{- end }}
{{- end }}

{{- define "tandem.apiKeysVolume" -}}
{{- with include "tandem.apiKeysEntry" . }}
- name: api-keys
  secret:
    secretName: {{ include "tandem.secretName" $ }}
    defaultMode: 0440
    items:
      - key: {{ . }}
        path: api-keys
{{- end }}
{{- end }}

{{- define "tandem.apiKeysMount" -}}
{{- if include "tandem.apiKeysEntry" . }}
- name: api-keys
  mountPath: /etc/tandem/keys
  readOnly: true
{{- end }}
{{- end }}

{{/* A probe: (list path periodSeconds failureThreshold). The timeout is ten seconds, because a busy process answers late. */}}
{{- define "tandem.probe" -}}
httpGet:
  path: {{ index . 0 }}
  port: http
periodSeconds: {{ index . 1 }}
timeoutSeconds: 10
failureThreshold: {{ index . 2 }}
{{- end }}

{{/* Hashes of the settings whose change must restart the pods: the root. */}}
{{- define "tandem.checksums" -}}
checksum/auth: {{ toJson (list .Values.auth .Values.router.keyLimits) | sha256sum }}
checksum/simulation: {{ toJson .Values.simulation | sha256sum }}
{{- end }}
