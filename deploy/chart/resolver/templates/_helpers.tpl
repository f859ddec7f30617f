{{/* Names. */}}
{{- define "resolver.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end }}

{{- define "resolver.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end }}

{{- define "resolver.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "resolver.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end }}

{{- define "resolver.image" -}}
{{- $image := .Values.image -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $image.repository $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $image.repository (default .Chart.AppVersion $image.tag | replace "+" "-") -}}
{{- end -}}
{{- end }}

{{/* A selector's labels may never change; the other labels of a release are added. */}}
{{- define "resolver.selectorLabels" -}}
app.kubernetes.io/name: {{ include "resolver.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "resolver.labels" -}}
{{- $ours := include "resolver.selectorLabels" . | fromYaml -}}
{{- $_ := set $ours "helm.sh/chart" (printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_") -}}
{{- $_ := set $ours "app.kubernetes.io/version" (.Chart.AppVersion | replace "+" "-") -}}
{{- $_ := set $ours "app.kubernetes.io/managed-by" .Release.Service -}}
{{- merge $ours (default dict .Values.commonLabels) | toYaml -}}
{{- end }}

{{/* Metadata of an object that may be in another namespace: list of the root and its values (namespace, labels, annotations). */}}
{{- define "resolver.metadata" -}}
{{- $root := index . 0 -}}
{{- $values := index . 1 -}}
name: {{ include "resolver.fullname" $root }}
namespace: {{ default $root.Release.Namespace $values.namespace }}
labels:
  {{- merge (include "resolver.labels" $root | fromYaml) (default dict $values.labels) | toYaml | nindent 2 }}
{{- with $values.annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Needs of each source: capabilities as in resolver/base/source_records.py, and before Linux 5.11 SYS_RESOURCE for locked
memory; resources as measured. */}}
{{- define "resolver.needs" -}}
capabilities:
  {{- if eq .Values.source "scan" }} [SYS_PTRACE]
  {{- else if eq .Values.source "netlink" }} [SYS_PTRACE, NET_ADMIN]
  {{- else }} [SYS_PTRACE, BPF, PERFMON, SYS_RESOURCE]
  {{- end }}
resources:
  requests:
    cpu: 20m
    memory: 96Mi
  limits:
    # The compiler of the BPF program needs 160Mi for half a second. No CPU limit: it would only delay repairs.
    memory: {{ has .Values.source (list "scan" "netlink") | ternary "192Mi" "384Mi" }}
{{- end }}

{{/* The directories to mount and search, and the labels of nodes, as JSON: the scheduler's, unless others are named. */}}
{{- define "resolver.dirs" -}}
{{- $of := dict "volcano" "/usr/local/vgpu/vgpu/containers" "dra" "/usr/local/vgpu/claims" -}}
{{- $named := .Values.settings.containers_dir -}}
{{- if and (hasKey $of (default "" .Values.scheduler)) (eq (toJson $named) (toJson (list "/usr/local/vgpu/containers"))) -}}
{{- list (get $of .Values.scheduler) | toJson -}}
{{- else -}}
{{- toJson $named -}}
{{- end -}}
{{- end }}

{{- define "resolver.nodeSelector" -}}
{{- $named := default dict .Values.nodeSelector -}}
{{- if and (has (default "" .Values.scheduler) (list "volcano" "koordinator" "kai" "dra")) (eq (toJson $named) (toJson (dict "gpu" "on"))) -}}
{{- dict "nvidia.com/gpu.present" "true" | toJson -}}
{{- else -}}
{{- toJson $named -}}
{{- end -}}
{{- end }}

{{/* The measured resources, merged with those of the values; null removes a figure. */}}
{{- define "resolver.resources" -}}
{{- $resources := (include "resolver.needs" . | fromYaml).resources -}}
{{- range $kind, $figures := .Values.resources -}}
{{- range $name, $figure := $figures -}}
{{- if kindIs "invalid" $figure -}}
{{- $_ := unset (get $resources $kind) $name -}}
{{- else -}}
{{- $_ := set (get $resources $kind) $name $figure -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end }}

{{/* "true" or nothing. The proc connector answers in the host's network namespace only. */}}
{{- define "resolver.hostNetwork" -}}
{{- if kindIs "bool" .Values.hostNetwork -}}
{{- if .Values.hostNetwork }}true{{ end -}}
{{- else if eq .Values.source "netlink" -}}
true
{{- end -}}
{{- end }}

{{/* Host and port of the metrics; both are empty if there are none. */}}
{{- define "resolver.port" -}}
{{- if ne .Values.settings.metrics_addr "off" -}}
{{- regexFind "[0-9]+$" .Values.settings.metrics_addr -}}
{{- end -}}
{{- end }}

{{- define "resolver.host" -}}
{{- if ne .Values.settings.metrics_addr "off" -}}
{{- $host := regexReplaceAll ":[0-9]+$" .Values.settings.metrics_addr "" -}}
{{- if not (has $host (list "" "0.0.0.0" "[::]")) -}}
{{- $host | trimPrefix "[" | trimSuffix "]" -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "resolver.updateStrategy" -}}
{{- if .Values.updateStrategy -}}
{{- toYaml .Values.updateStrategy -}}
{{- else -}}
{{- $together := not (and (include "resolver.hostNetwork" .) (include "resolver.port" .)) -}}
{{- $together = and $together (or .Values.settings.wait .Values.settings.dry_run) -}}
type: RollingUpdate
rollingUpdate:
  maxSurge: {{ $together | ternary 1 0 }}
  maxUnavailable: {{ $together | ternary 0 1 }}
{{- end -}}
{{- end }}

{{/* A setting's text in the environment. Numbers of a values file are floats: never 4.194304e+06. */}}
{{- define "resolver.setting" -}}
{{- if kindIs "slice" . -}}
{{- join ":" . -}}
{{- else if kindIs "float64" . -}}
{{- if eq (floor .) . }}{{ int64 . }}{{ else }}{{ . }}{{ end -}}
{{- else -}}
{{- . -}}
{{- end -}}
{{- end }}

{{/* The directory above the broker's, with its lock. */}}
{{- define "resolver.brokerPlace" -}}
{{- with .Values.settings.broker -}}
{{- dir (dir .) -}}
{{- end -}}
{{- end }}

{{/* Secrets of the metrics by the name of their volume, and the settings that name their files. */}}
{{- define "resolver.metricsSecrets" -}}
{{- $secrets := dict -}}
{{- with .Values.metricsSecrets.tls }}{{ $_ := set $secrets "metrics-tls" . }}{{ end -}}
{{- with .Values.metricsSecrets.token }}{{ $_ := set $secrets "metrics-token" . }}{{ end -}}
{{- toJson $secrets -}}
{{- end }}

{{- define "resolver.metricsFiles" -}}
{{- $files := dict -}}
{{- if .Values.metricsSecrets.tls -}}
{{- $files = dict "metrics_tls_cert" "/etc/resolver/metrics-tls/tls.crt" "metrics_tls_key" "/etc/resolver/metrics-tls/tls.key" -}}
{{- end -}}
{{- if .Values.metricsSecrets.token }}{{ $_ := set $files "metrics_token_file" "/etc/resolver/metrics-token/token" }}{{ end -}}
{{- toJson $files -}}
{{- end }}

{{/* "true" if the metrics have TLS. */}}
{{- define "resolver.tls" -}}
{{- if or .Values.metricsSecrets.tls .Values.settings.metrics_tls_cert }}true{{ end -}}
{{- end }}

{{/* A probe: list of the root, its path, and its values. */}}
{{- define "resolver.probe" -}}
{{- $root := index . 0 -}}
httpGet:
  path: {{ index . 1 }}
  port: metrics
  {{- if include "resolver.tls" $root }}
  scheme: HTTPS
  {{- end }}
  {{- with include "resolver.host" $root }}
  host: {{ . | quote }}
  {{- end }}
{{ toYaml (index . 2) }}
{{- end }}

{{/* The endpoint of both monitors: list of the root and the monitor's values. */}}
{{- define "resolver.endpoint" -}}
{{- $root := index . 0 -}}
{{- $monitor := index . 1 -}}
port: metrics
path: /metrics
honorLabels: {{ $monitor.honorLabels }}
{{- if include "resolver.tls" $root }}
scheme: https
{{- $ca := dict "secret" (dict "name" $root.Values.metricsSecrets.tls "key" "ca.crt") }}
tlsConfig:
  {{- $name := printf "%s.%s.svc" (include "resolver.fullname" $root) $root.Release.Namespace }}
  {{- default (dict "ca" $ca "serverName" $name) $monitor.tlsConfig | toYaml | nindent 2 }}
{{- end }}
{{- with $root.Values.metricsSecrets.token }}
authorization:
  credentials:
    name: {{ . }}
    key: token
{{- end }}
{{- with $monitor.interval }}
interval: {{ . }}
{{- end }}
{{- with $monitor.scrapeTimeout }}
scrapeTimeout: {{ . }}
{{- end }}
relabelings:
  # The alerts and the dashboard identify the job by this name, and each daemon by its node.
  - targetLabel: job
    replacement: resolver
  - sourceLabels: [__meta_kubernetes_pod_node_name]
    targetLabel: node
  {{- with $monitor.relabelings }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with $monitor.metricRelabelings }}
metricRelabelings:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* The pod's, with the SELinux type that may read other containers' processes on OpenShift. */}}
{{- define "resolver.podSecurityContext" -}}
{{- $ours := dict -}}
{{- if .Values.openshift.enabled }}{{ $ours = dict "seLinuxOptions" (dict "type" "spc_t") }}{{ end -}}
{{- merge (deepCopy (default dict .Values.podSecurityContext)) $ours | toYaml -}}
{{- end }}
