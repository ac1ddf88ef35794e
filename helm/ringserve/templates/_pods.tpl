{{/* Seconds for running turns when a pod of rings or the head ends; the ring leaves in the rest.
     Called with the pod's values. */}}
{{- define "ringserve.drainSeconds" -}}
{{ max 0 (sub (int .terminationGracePeriodSeconds) 60) }}
{{- end }}

{{/* Metadata and settings common to the pods of head, workers and gateway.
     Called with (dict "root" $ "part" values "component" name).
     Secrets by name are mounted at /etc/ringserve-NAME: (dict ... "secrets" (dict "tls" "my-secret")). */}}
{{- define "ringserve.podMetadata" -}}
annotations:
  checksum/config: {{ include "ringserve.config" .root | sha256sum }}
  {{- with .annotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- with .part.podAnnotations }}
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
{{- end }}
{{- with .part.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .part.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
volumes:
  - name: tmp
    emptyDir: {}
  - name: config
    configMap:
      name: {{ include "ringserve.fullname" .root }}
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
  - name: POD_IP
    valueFrom: {fieldRef: {fieldPath: status.podIP}}
  {{- with .part.env }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
resources:
  {{- toYaml .part.resources | nindent 2 }}
volumeMounts:
  - {name: tmp, mountPath: /tmp}
  - {name: config, mountPath: /etc/ringserve, readOnly: true}
  {{- if .root.Values.model.volume }}
  - {name: model, mountPath: {{ .root.Values.model.mountPath }}, readOnly: true}
  {{- end }}
  {{- if .part.journalVolume }}
  - {name: journal, mountPath: /var/lib/ringserve}
  {{- end }}
  {{- range $name, $secret := .secrets }}
  - {name: {{ $name }}, mountPath: /etc/ringserve-{{ $name }}, readOnly: true}
  {{- end }}
{{- end }}
