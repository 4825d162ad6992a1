{{/* Labels of an object, and of its pods. Argument: [name, component]. */}}
{{- define "baton.labels" -}}
app.kubernetes.io/name: {{ index . 0 }}
app.kubernetes.io/component: {{ index . 1 }}
app.kubernetes.io/part-of: baton
{{- end }}

{{- define "baton.podLabels" -}}
labels:
  {{- include "baton.labels" . | nindent 2 }}
{{- end }}

{{/* What every pod has. Argument: the root. */}}
{{- define "baton.pod" -}}
{{- with .Values.images.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{/* What every container has. */}}
{{- define "baton.confined" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{/* Variables of a process of Baton. Argument: [root, path of its NATS key], and true for a worker. */}}
{{- define "baton.env" -}}
{{- $root := index . 0 -}}
envFrom:
  - configMapRef: {name: settings, optional: true}
  {{- with $root.Values.settingsSecret }}
  - secretRef: {name: {{ . }}}
  {{- end }}
env:
  {{- if gt (len .) 2 }}
  - name: WORKER_WORKER_ID  # The job `keys` has made a key for each.
    valueFrom: {fieldRef: {fieldPath: metadata.name}}
  {{- end }}
  - {name: BATON_NATS_URL, value: {{ $root.Values.nats.url | quote }}}
  - {name: BATON_NATS_NKEY_FILE, value: {{ index . 1 }}}
  - {name: BATON_NATS_CA_FILE, value: /keys/own/ca.pem}
  {{- if not (hasKey $root.Values.settings "BATON_LOG_FORMAT") }}
  - {name: BATON_LOG_FORMAT, value: json}
  {{- end }}
{{- end }}

{{/* Pods start again when the settings change. */}}
{{- define "baton.checksum" -}}
{{- with .Values.settings }}
annotations:
  baton/settings: {{ toJson . | sha256sum | trunc 16 | quote }}
{{- end }}
{{- end }}

{{/* The groups of workers with what they leave out. */}}
{{- define "baton.groups" -}}
{{- $groups := dict -}}
{{- range $name, $given := .Values.workers -}}
{{- if $given -}}
{{- $_ := set $groups $name (mergeOverwrite (dict "replicas" 1 "replicasMax" 16 "settings" dict "gpus" 0 "rdma" dict "limits" dict "pod" dict) (deepCopy $given)) -}}
{{- if gt (int (index $groups $name).replicas) (int (index $groups $name).replicasMax) -}}
{{- fail (printf "workers.%s: replicas is more than replicasMax, for which there are keys" $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if not $groups }}{{ fail "workers is empty: name at least one group" }}{{ end -}}
{{ toJson $groups }}
{{- end }}

{{/* A value as text, in quotes: Helm reads every number as a float, which it would write as 2e+09. */}}
{{- define "baton.text" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) }}{{ int64 . | quote }}{{ else }}{{ toString . | quote }}{{ end }}
{{- end }}
