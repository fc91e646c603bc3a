{{/* Settings as TOML, and where the model is. */}}

{{/* One value. Helm reads every number as a float, and large ones would print with an exponent. */}}
{{- define "twinflow.toml.value" -}}
{{- if kindIs "float64" . -}}
{{- if eq (floor .) . }}{{ int64 . }}{{ else }}{{ . }}{{ end -}}
{{- else -}}
{{- toRawJson . -}}
{{- end -}}
{{- end }}

{{/* A dict: scalars first, then one [table] per dict. Keys in order, so that the text changes only with the values. */}}
{{- define "twinflow.toml" -}}
{{- $dict := . -}}
{{- range $key := keys . | sortAlpha }}
{{- $value := index $dict $key }}
{{- if not (kindIs "map" $value) }}
{{ $key }} = {{ include "twinflow.toml.value" $value }}
{{- end }}
{{- end }}
{{- range $key := keys . | sortAlpha }}
{{- $value := index $dict $key }}
{{- if and (kindIs "map" $value) $value }}
[{{ $key }}]
{{- include "twinflow.toml" $value }}
{{- end }}
{{- end }}
{{- end }}

{{- define "twinflow.anyHost" -}}
{{ ternary "::" "0.0.0.0" (eq .Values.ipFamily "IPv6") }}
{{- end }}

{{/* Folder (or hub id, which workers resolve) of the model. (dict "root" $ "component" "router") */}}
{{- define "twinflow.model" -}}
{{- with .root.Values.model -}}
{{- if eq .source "image" }}{{ .path -}}
{{- else if eq .source "pvc" }}{{ printf "/models/%s" .path | trimSuffix "/" -}}
{{- else if eq .source "hostPath" }}/models
{{- else if eq $.component "router" }}/models/{{ .name -}}
{{- else }}{{ .hubId -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "twinflow.model.volume" -}}
{{- with .Values.model }}
{{- if eq .source "pvc" }}
- name: model
  persistentVolumeClaim: { claimName: {{ .claim }}, readOnly: true }
{{- else if eq .source "hostPath" }}
- name: model
  hostPath: { path: {{ .path }}, type: Directory }
{{- end }}
{{- end }}
{{- end }}

{{- define "twinflow.model.mount" -}}
{{- if has .Values.model.source (list "pvc" "hostPath") }}
- { name: model, mountPath: /models, readOnly: true }
{{- end }}
{{- end }}

{{- define "twinflow.model.token" -}}
{{- with .Values.model.tokenSecret }}
{{- if and .name (eq $.Values.model.source "hub") }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef: { name: {{ .name }}, key: {{ .key }} }
{{- end }}
{{- end }}
{{- end }}

{{/* The file of one service: what the operator gave, then what the chart knows. (dict "root" $ "component" "router") */}}
{{- define "twinflow.config" -}}
{{- $values := .root.Values -}}
{{- $host := include "twinflow.anyHost" .root -}}
{{- $config := deepCopy (index $values .component).config -}}
{{- $_ := mergeOverwrite $config (dict "model" (include "twinflow.model" .) "served_model" $values.model.name) -}}
{{- $redis := eq $values.registry.kind "redis" -}}
{{- if $redis -}}
{{- $_ := mergeOverwrite $config (dict
  "registry" "redis"
  "redis_prefix" (include "twinflow.redisPrefix" .root)
  "redis_ttl_s" $values.registry.redisTtlSeconds
) -}}
{{- end -}}
{{- if eq .component "router" -}}
{{- $ports := dict "http_host" $host "http_port" $values.ports.http "grpc_host" $host "grpc_port" $values.ports.registry -}}
{{- $config = mergeOverwrite $config $ports -}}
{{- /* The router predicts what decode workers decide: both go by the same number. */ -}}
{{- $config = mergeOverwrite $config (pick $values.decode.config "local_max_tokens") -}}
{{- if $values.router.apiKeys.name }}{{ $_ := set $config "api_keys" "/etc/twinflow-keys/keys.toml" }}{{ end -}}
{{- else -}}
{{- $aggregated := eq (int $values.prefill.replicas) 0 -}}
{{- $registry := printf "%s:%v" (include "twinflow.registryHost" .root) $values.ports.registry -}}
{{- $_ := mergeOverwrite $config (dict "host" $host "port" $values.ports.worker) -}}
{{- $_ := mergeOverwrite $config (dict "metrics_host" $host "metrics_port" $values.ports.metrics) -}}
{{- if not $redis }}{{ $_ := set $config "router" (list $registry) }}{{ end -}}
{{- $_ := set $config "role" (ternary "both" .component $aggregated) -}}
{{- if $aggregated -}}{{- /* nobody to move anything from or to */ -}}
{{- $config = merge $config (dict "engine" (dict "transport" "none")) -}}
{{- end -}}
{{- end -}}
{{- include "twinflow.toml" $config | trim -}}
{{- end }}

{{/* What goes into /etc/twinflow: the file, and for workers what their preStop runs. */}}
{{- define "twinflow.configMap" -}}
apiVersion: v1
kind: ConfigMap
metadata:
  name: {{ include "twinflow.fullname" .root }}-{{ .component }}
  labels:
    {{- include "twinflow.labels" . | nindent 4 }}
data:
  {{ .component }}.toml: |
    {{- include "twinflow.config" . | nindent 4 }}
  {{- if ne .component "router" }}
  drain.py: |
    {{- .root.Files.Get "files/drain.py" | trim | nindent 4 }}
  {{- end }}
{{- end }}

{{- define "twinflow.redisPrefix" -}}
{{ .Values.registry.redisPrefix | default (printf "%s.%s" .Release.Namespace (include "twinflow.fullname" .)) }}
{{- end }}

{{/*
Environment of a service with registry.kind=redis: the URL, which may hold a password, from a Secret, or of the chart's own
Redis, whose password Kubernetes puts into the URL.
*/}}
{{- define "twinflow.redis.env" -}}
{{- $redis := .Values.redis -}}
{{- if eq .Values.registry.kind "redis" }}
{{- if .Values.registry.urlSecret.name }}
- name: TWINFLOW_REDIS_URL
  valueFrom:
    secretKeyRef: { name: {{ .Values.registry.urlSecret.name }}, key: {{ .Values.registry.urlSecret.key }} }
{{- else if $redis.enabled }}
{{- if $redis.passwordSecret.name }}
- name: REDIS_AUTH
  valueFrom:
    secretKeyRef: { name: {{ $redis.passwordSecret.name }}, key: {{ $redis.passwordSecret.key }} }
{{- end }}
- name: TWINFLOW_REDIS_URL
  value: redis://{{ if $redis.passwordSecret.name }}:$(REDIS_AUTH)@{{ end }}{{ include "twinflow.fullname" . }}-redis:6379/0
{{- else }}
{{- fail "registry.kind=redis needs registry.urlSecret.name, or redis.enabled=true" }}
{{- end }}
{{- end }}
{{- end }}
