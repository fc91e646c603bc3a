{{/*
A prefill or decode worker: one pod per GPU. (dict "root" $ "component" "prefill")

A Deployment and no StatefulSet: what a worker holds lives in its GPU's memory and ends with the process, its id only has
to be unique (the pod's name), and the pods of a lost node are replaced without a person deleting them.
*/}}
{{- define "twinflow.worker" -}}
{{- $role := index .root.Values .component -}}
{{- $root := .root -}}
{{- $startup := mul $role.probes.startup.periodSeconds $role.probes.startup.failureThreshold -}}
{{- $health := dict "grpc" (dict "port" ($root.Values.ports.worker | int)) -}}
{{- $hub := eq $root.Values.model.source "hub" -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ include "twinflow.fullname" $root }}-{{ .component }}
  labels:
    {{- include "twinflow.labels" . | nindent 4 }}
spec:
  replicas: {{ $role.replicas }}
  revisionHistoryLimit: 3
  minReadySeconds: 5
  progressDeadlineSeconds: {{ add $startup 300 }}
  strategy:
    type: RollingUpdate
    rollingUpdate: { maxSurge: {{ $role.strategy.maxSurge }}, maxUnavailable: {{ $role.strategy.maxUnavailable }} }
  selector:
    matchLabels:
      {{- include "twinflow.selector" . | nindent 6 }}
  template:
    metadata:
      {{- include "twinflow.podMeta" . | nindent 6 }}
    spec:
      {{- include "twinflow.podSpec" . | nindent 6 }}
      terminationGracePeriodSeconds: {{ add $role.drainSeconds 15 }}
      containers:
        - name: {{ .component }}
          image: {{ include "twinflow.image" (dict "root" $root "image" $root.Values.image.engine) }}
          imagePullPolicy: {{ $root.Values.image.engine.pullPolicy }}
          args:
            - {{ .component }}
            - --config=/etc/twinflow/{{ .component }}.toml
            - --worker-id=$(POD_NAME)
            - --advertise={{ ternary "[$(POD_IP)]" "$(POD_IP)" (eq $root.Values.ipFamily "IPv6") }}:{{ $root.Values.ports.worker }}
            {{- range $role.extraArgs }}
            - {{ . | quote }}
            {{- end }}
          env:
            - name: POD_NAME
              valueFrom: { fieldRef: { fieldPath: metadata.name } }
            - name: POD_IP # what others dial
              valueFrom: { fieldRef: { fieldPath: status.podIP } }
            - { name: HOME, value: /cache }
            - { name: HF_HOME, value: /cache/huggingface }
            - { name: HF_HUB_OFFLINE, value: {{ ternary "0" "1" $hub | quote }} }
            - { name: TRITON_CACHE_DIR, value: /cache/triton }
            - { name: UCX_NET_DEVICES, value: {{ $root.Values.nixl.netDevices | quote }} }
            {{- with $root.Values.nixl.tls }}
            - { name: UCX_TLS, value: {{ . | quote }} }
            {{- end }}
            {{- with $root.Values.ports.nixl }}
            - { name: UCX_TCP_PORT_RANGE, value: "{{ .first }}-{{ .last }}" }
            {{- end }}
            {{- with include "twinflow.model.token" $root | trim }}
            {{- . | nindent 12 }}
            {{- end }}
            {{- with include "twinflow.redis.env" $root | trim }}
            {{- . | nindent 12 }}
            {{- end }}
            {{- with $role.extraEnv }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
          ports:
            - { name: grpc, containerPort: {{ $root.Values.ports.worker }} }
            - { name: metrics, containerPort: {{ $root.Values.ports.metrics }} }
          {{- with $role.drainSeconds }}
          lifecycle: # takes nothing new, finishes what it has; SIGTERM after that
            preStop:
              exec: { command: [python, /etc/twinflow/drain.py, "localhost:{{ $root.Values.ports.worker }}", "{{ . }}"] }
          {{- end }}
          # Health is answered by the front process, SERVING from warm to stop; the front exits when its engine dies.
          # The peers of a worker are no part of it: a decode worker lives without any prefill worker.
          startupProbe:
            {{- include "twinflow.probe" (dict "probe" $role.probes.startup "check" $health) | nindent 12 }}
          livenessProbe:
            {{- include "twinflow.probe" (dict "probe" $role.probes.liveness "check" $health) | nindent 12 }}
          readinessProbe:
            {{- include "twinflow.probe" (dict "probe" $role.probes.readiness "check" $health) | nindent 12 }}
          resources:
            {{- toYaml $role.resources | nindent 12 }}
          securityContext:
            {{- include "twinflow.containerSecurity" $role.addCapabilities | nindent 12 }}
          volumeMounts:
            - { name: config, mountPath: /etc/twinflow, readOnly: true }
            - { name: tmp, mountPath: /tmp }
            - { name: cache, mountPath: /cache }
            - { name: shm, mountPath: /dev/shm }
            {{- if and $hub $root.Values.model.hubCacheClaim }}
            - { name: hub, mountPath: /cache/huggingface }
            {{- end }}
            {{- with include "twinflow.model.mount" $root | trim }}
            {{- . | nindent 12 }}
            {{- end }}
            {{- with $role.extraVolumeMounts }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
      volumes:
        - name: config
          configMap: { name: {{ include "twinflow.fullname" $root }}-{{ .component }} }
        - name: tmp
          emptyDir: { sizeLimit: {{ $role.tmpSize }} }
        - name: cache
          emptyDir: { sizeLimit: {{ $role.cacheSize }} }
        - name: shm # UCX; counts towards the memory limit
          emptyDir: { medium: Memory, sizeLimit: {{ $role.shmSize }} }
        {{- if and $hub $root.Values.model.hubCacheClaim }}
        - name: hub
          persistentVolumeClaim: { claimName: {{ $root.Values.model.hubCacheClaim }} }
        {{- end }}
        {{- with include "twinflow.model.volume" $root | trim }}
        {{- . | nindent 8 }}
        {{- end }}
        {{- with $role.extraVolumes }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
{{- end }}
