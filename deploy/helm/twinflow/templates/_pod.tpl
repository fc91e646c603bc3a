{{/* What every pod of this chart has. */}}

{{- define "twinflow.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ .Values.podSecurity.runAsUser }}
runAsGroup: {{ .Values.podSecurity.runAsGroup }}
fsGroup: {{ .Values.podSecurity.fsGroup }}
fsGroupChangePolicy: OnRootMismatch
{{- with .Values.podSecurity.supplementalGroups }}
supplementalGroups: {{ toJson . }}
{{- end }}
seccompProfile: { type: RuntimeDefault }
{{- end }}

{{/* A list of capabilities to add, usually empty. */}}
{{- define "twinflow.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
  {{- with . }}
  add: {{ toJson . }}
  {{- end }}
{{- end }}

{{/*
(dict "root" $ "component" "router"): pod metadata. A changed configuration rolls the pods; a changed chart version alone must
not, so only the selector's labels are here.
*/}}
{{- define "twinflow.podMeta" -}}
{{- $role := index .root.Values .component -}}
labels:
  {{- mergeOverwrite (deepCopy $role.podLabels) (include "twinflow.selector" . | fromYaml) | toYaml | nindent 2 }}
annotations:
  checksum/config: {{ include "twinflow.config" . | sha256sum }}
  {{- with $role.podAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{/* The first lines of a pod's spec: identity and where it may run. */}}
{{- define "twinflow.podSpec" -}}
{{- $role := index .root.Values .component -}}
serviceAccountName: {{ include "twinflow.serviceAccount" . }}
automountServiceAccountToken: {{ $role.serviceAccount.automountToken }}
enableServiceLinks: false
securityContext:
  {{- include "twinflow.podSecurity" .root | nindent 2 }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
{{- range $key := list "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" }}
{{- with index $role $key }}
{{ $key }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- range $key := list "priorityClassName" "runtimeClassName" }}
{{- with index $role $key }}
{{ $key }}: {{ . }}
{{- end }}
{{- end }}
{{- end }}

{{/* (dict "probe" values "check" dict): a probe as the pod API has it. */}}
{{- define "twinflow.probe" -}}
{{ merge (deepCopy .probe) .check | toYaml }}
{{- end }}
