{{/* Seconds for running turns when a pod of rings or the head ends; the ring leaves in the rest.
     Called with the pod's values. */}}
{{- define "ringserve.drainSeconds" -}}
{{ max 0 (sub (int .terminationGracePeriodSeconds) 60) }}
{{- end }}

{{/* Metadata and settings common to the pods of head, workers and gateway.
     Called with (dict "root" $ "part" values "component" name).
     Secrets by name are mounted at /etc/ringserve-NAME: (dict ... "secrets" (dict "tls" "my-secret")). */}}
{{- define "ringserve.podMetadata" -}}
{{- with merge (dict) (.annotations | default dict) .part.podAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
labels:
  {{- include "ringserve.labels" .root | nindent 2 }}
  app.kubernetes.io/component: {{ .component }}
  {{- with .part.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{- define "ringserve.podSettings" -}}
serviceAccountName: {{ include "ringserve.serviceAccountName" .root }}
automountServiceAccountToken: {{ .callsKubernetes | default false }}
enableServiceLinks: false
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  {{- toYaml .root.Values.podSecurityContext | nindent 2 }}
{{- with .part.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .part.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .part.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .part.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- toYaml . | nindent 2 }}
{{- else }}
{{- if eq .component "gateway" }}
# Without constraints of the user's, gateways keep off each other's nodes where they can.
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "ringserve.selectorLabels" .root | nindent 8 }}
        app.kubernetes.io/component: gateway
{{- end }}
{{- end }}
{{- with .part.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .part.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .part.initContainers }}
initContainers:
  {{- toYaml . | nindent 2 }}
{{- end }}
volumes:
  - name: tmp
    emptyDir: {{ with .root.Values.tmpSizeLimit }}{sizeLimit: {{ . }}}{{ else }}{}{{ end }}
  {{- if eq .component "head" }}
  # The head alone reads it: other pods need no replacement for another configuration.
  - name: config
    configMap:
      name: {{ include "ringserve.configName" .root }}
  {{- end }}
  {{- with .root.Values.model.volume }}
  - name: model
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .part.journalVolume }}
  - name: journal
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- range $name, $secret := .secrets }}
  - {name: {{ $name }}, secret: {secretName: {{ $secret }}}}
  {{- end }}
  {{- with .part.extraVolumes }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{- define "ringserve.containerSettings" -}}
image: {{ include "ringserve.image" .root }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
securityContext:
  {{- toYaml .root.Values.securityContext | nindent 2 }}
env:
  # The root file system is read-only: everything that is written goes to the volume at /tmp.
  - {name: HOME, value: /tmp}
  - {name: HF_HOME, value: /tmp/huggingface}
  - {name: RINGSERVE_CACHE, value: /tmp/ringserve}
  - {name: RINGSERVE_STATE, value: /tmp/ringserve-state}
  - {name: RAY_USAGE_STATS_ENABLED, value: "0"}
  {{- if eq .component "head" }}
  # Ray takes a silent node for dead after 3.6 s, and not after a minute: rings may then be rebuilt on others.
  - {name: RAY_health_check_period_ms, value: "400"}
  - {name: RAY_health_check_timeout_ms, value: "800"}
  - {name: RAY_health_check_failure_threshold, value: "3"}
  {{- if eq .root.Values.ray.gcsStorage "volume" }}
  # A folder for each release of Ray, whose formats differ.
  - {name: RAY_gcs_storage, value: rocksdb}
  - {name: RAY_gcs_storage_path, value: /var/lib/ringserve/gcs-{{ .root.Values.ray.version }}}
  {{- end }}
  {{- else if and (ne .component "gateway") (eq .root.Values.ray.gcsStorage "volume") }}
  # Ray of a worker waits that long for another head. KubeRay sets the same with Redis.
  - {name: RAY_gcs_rpc_server_reconnect_timeout_s, value: "600"}
  {{- end }}
  - name: POD_IP
    valueFrom: {fieldRef: {fieldPath: status.podIP}}
  {{- with .part.env }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
resources:
  {{- include "ringserve.resources" .part | nindent 2 }}
volumeMounts:
  - {name: tmp, mountPath: /tmp}
  {{- if eq .component "head" }}
  - {name: config, mountPath: /etc/ringserve, readOnly: true}
  {{- end }}
  {{- if .root.Values.model.volume }}
  - {name: model, mountPath: {{ .root.Values.model.mountPath }}, readOnly: true}
  {{- end }}
  {{- if .part.journalVolume }}
  - {name: journal, mountPath: /var/lib/ringserve}
  {{- end }}
  {{- range $name, $secret := .secrets }}
  - {name: {{ $name }}, mountPath: /etc/ringserve-{{ $name }}, readOnly: true}
  {{- end }}
  {{- with .part.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{/*
Resources of a container. Those of ranks have defaults: memory of 4Gi a process, requests as the limits, and the
processors that Ray is told of. A pod that asks for less than it may take is the first to be evicted.
Called with the pod's values.
*/}}
{{- define "ringserve.resources" -}}
{{- $resources := deepCopy (default dict .resources) }}
{{- if .ranksPerPod }}
{{- $limits := default dict $resources.limits }}
{{- $requests := default dict $resources.requests }}
{{- if not (or (hasKey $limits "memory") (hasKey $requests "memory")) }}
{{- $limits = set $limits "memory" (printf "%dGi" (mul 4 .ranksPerPod)) }}
{{- end }}
{{- if not (hasKey $requests "memory") }}{{- $requests = set $requests "memory" $limits.memory }}{{- end }}
{{- if not (hasKey $requests "cpu") }}
{{- $threads := toString (mul .ranksPerPod .threadsPerRank) }}
{{- $requests = set $requests "cpu" ($limits.cpu | default $threads) }}
{{- end }}
{{- $resources = set (set $resources "limits" $limits) "requests" $requests }}
{{- end }}
{{- toYaml $resources }}
{{- end }}
