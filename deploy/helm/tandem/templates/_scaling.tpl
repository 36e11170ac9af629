{{/* Speed of scaling down: (list root component). */}}
{{- define "tandem.scalingBehavior" -}}
{{- $scaling := (index (first .).Values (last .)).autoscaling -}}
scaleDown:
  stabilizationWindowSeconds: {{ int $scaling.scaleDownStabilizationSeconds }}
  policies:
    # Remove one pod at a time, so that the others have room for its requests.
    - type: Pods
      value: 1
      periodSeconds: 60
{{- end }}

{{- define "tandem.scalingTarget" -}}
apiVersion: apps/v1
kind: {{ ternary "Deployment" "StatefulSet" (eq (last .) "router") }}
name: {{ include "tandem.component" . }}
{{- end }}
