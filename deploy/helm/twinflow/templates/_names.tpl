{{/* Names, labels and images. A component is router, prefill, decode, redis or test. */}}

{{- define "twinflow.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{- define "twinflow.fullname" -}}
{{- $name := include "twinflow.name" . -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- .Values.fullnameOverride | default $full | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{/* (dict "root" $ "component" "router") → what selectors match: never changes within a release. */}}
{{- define "twinflow.selector" -}}
app.kubernetes.io/name: {{ include "twinflow.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "twinflow.labels" -}}
{{ include "twinflow.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: twinflow
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{/* (dict "root" $ "image" .Values.image.router): a digest wins over a tag, the default tag is the chart's appVersion. */}}
{{- define "twinflow.image" -}}
{{- with .image -}}
{{- .repository -}}{{- if .digest }}@{{ .digest }}{{ else }}:{{ .tag | default $.root.Chart.AppVersion }}{{ end -}}
{{- end -}}
{{- end }}

{{/* (dict "root" $ "component" "router") */}}
{{- define "twinflow.serviceAccount" -}}
{{- $account := (index .root.Values .component).serviceAccount -}}
{{- $own := printf "%s-%s" (include "twinflow.fullname" .root) .component -}}
{{- $account.name | default (ternary $own "default" $account.create) -}}
{{- end }}

{{- define "twinflow.registryHost" -}}
{{ include "twinflow.fullname" . }}-registry
{{- end }}
