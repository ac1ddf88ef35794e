{{- define "ringserve.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" }}
{{- end }}

{{/* Name of the release's objects, short enough for the suffixes that KubeRay appends to pods and services. */}}
{{- define "ringserve.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else if contains (include "ringserve.name" .) .Release.Name }}
{{- .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "ringserve.name" .) | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "ringserve.selectorLabels" -}}
app.kubernetes.io/name: {{ include "ringserve.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "ringserve.labels" -}}
{{ include "ringserve.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | quote }}
{{- end }}

{{- define "ringserve.image" -}}
{{- $message := "image.repository: required; build an image with the project's Dockerfile and name its repository" -}}
{{- $repository := required $message .Values.image.repository -}}
{{ $repository }}:{{ .Values.image.tag | default (printf "%s-%s" .Chart.AppVersion .Values.model.device) }}
{{- end }}

{{- define "ringserve.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "ringserve.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- default "default" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{/* Names under which clients reach the gateway's HTTP. A wildcard of a route is for gateway.http.hosts to name. */}}
{{- define "ringserve.httpHosts" -}}
{{- $hosts := list (printf "%s.%s" (include "ringserve.fullname" .) .Release.Namespace) }}
{{- if .Values.gateway.ingress.enabled }}{{ $hosts = append $hosts .Values.gateway.ingress.host }}{{ end }}
{{- range .Values.gateway.routes.httpHostnames }}
{{- if not (hasPrefix "*" .) }}{{ $hosts = append $hosts . }}{{ end }}
{{- end }}
{{- with .Values.gateway.http.hosts }}{{ $hosts = append $hosts . }}{{ end }}
{{- uniq $hosts | join " " }}
{{- end }}

{{/* Ports that several objects name. */}}
{{- define "ringserve.port.router" -}}50050{{- end }}
{{- define "ringserve.port.gateway" -}}50051{{- end }}
{{- define "ringserve.port.gatewayHttp" -}}8000{{- end }}
{{- define "ringserve.port.gatewayMetrics" -}}9464{{- end }}
{{- define "ringserve.port.routerMetrics" -}}9465{{- end }}
{{- define "ringserve.port.prefillMetrics" -}}9500{{- end }}
{{- define "ringserve.port.decodeMetrics" -}}9600{{- end }}

{{/* Rules of what a pod may call: the release's own pods, name servers, and what the user adds. */}}
{{- define "ringserve.egress" -}}
{{- if .Values.networkPolicy.egress.enabled -}}
egress:
  - to:
      - podSelector:
          matchLabels:
            {{- include "ringserve.selectorLabels" . | nindent 12 }}
  - ports:
      - {port: 53, protocol: UDP}
      - {port: 53, protocol: TCP}
  {{- with .Values.networkPolicy.egress.rules }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}
{{- end }}
