{{/*
Combinations of values that can't work, which the schema can't express. All are reported at once.
*/}}
{{- define "resolver.checks" -}}
{{- $wrong := list -}}
{{- $settings := .Values.settings -}}
{{- $port := include "resolver.port" . -}}
{{- $hostNetwork := include "resolver.hostNetwork" . -}}

{{- if not .Values.image.repository -}}
{{- $wrong = append $wrong "image.repository is empty: no image of resolver is published. Build it, push it to your registry (docs/kubernetes.md#the-image) and set its name, as in image.repository: registry.example.com/resolver" -}}
{{- end -}}

{{- if not .Values.hostPID -}}
{{- $wrong = append $wrong "hostPID is off: in a separate PID namespace the daemon sees no tenant and refuses to start. Leave hostPID at true; where that is forbidden, resolver can't be used" -}}
{{- end -}}

{{- if and (eq .Values.source "netlink") (not $hostNetwork) (not (has "SYS_ADMIN" (default list .Values.extraCapabilities))) -}}
{{- $wrong = append $wrong "source is netlink and hostNetwork is off: the kernel reports processes in the host's network namespace only. Leave hostNetwork empty, or let the daemon enter that namespace: extraCapabilities: [SYS_ADMIN]" -}}
{{- end -}}

{{- $units := dict "ms" 0.001 "s" 1.0 "" 1.0 "m" 60.0 "h" 3600.0 -}}
{{- range $name := list "interval" "nvml_interval" -}}
{{- $text := get $settings $name | toString | trim -}}
{{- if and $text (not (regexMatch "^[0-9]+(\\.[0-9]+)?\\s*(ms|s|m|h)?$" $text)) -}}
{{- $wrong = append $wrong (printf "settings.%s is %q: write a duration such as 250ms, 1s, 2m or 1h" $name $text) -}}
{{- else if $text -}}
{{- $seconds := mulf (regexFind "^[0-9.]+" $text | float64) (get $units (regexFind "[a-z]*$" $text)) -}}
{{- if or (lt $seconds 0.01) (gt $seconds 3600.0) -}}
{{- $wrong = append $wrong (printf "settings.%s is %q: write a duration from 10ms to 1h" $name $text) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- if $port -}}
{{- if or (lt (int $port) 1) (gt (int $port) 65535) -}}
{{- $wrong = append $wrong (printf "settings.metrics_addr is %q: a port is a number from 1 to 65535" $settings.metrics_addr) -}}
{{- end -}}
{{- if and (include "resolver.host" .) (not $hostNetwork) -}}
{{- $wrong = append $wrong (printf "settings.metrics_addr is %q: a pod knows its address only once it runs, and probes come to it. Write :%s, or set hostNetwork: true" $settings.metrics_addr $port) -}}
{{- end -}}
{{- end -}}
{{- $known := or .Values.metricsSecrets.tls .Values.metricsSecrets.token .Values.serviceMonitor.enabled .Values.podMonitor.enabled -}}
{{- if and $known (or $settings.metrics_tls_cert $settings.metrics_tls_key $settings.metrics_token_file) -}}
{{- $wrong = append $wrong "settings.metrics_tls_cert, metrics_tls_key and metrics_token_file name files that you mount yourself: neither metricsSecrets nor a monitor goes with them. Use metricsSecrets" -}}
{{- end -}}
{{- $reached := and $port (not (include "resolver.host" .)) -}}
{{- range $name := list "serviceMonitor" "podMonitor" "prometheusRule" "dashboard" -}}
{{- if and (index $.Values $name).enabled (not $reached) -}}
{{- $wrong = append $wrong (printf "%s is enabled, and settings.metrics_addr is %q: Prometheus would find nothing. Write :9395, or disable %s" $name $settings.metrics_addr $name) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.serviceMonitor.enabled .Values.podMonitor.enabled -}}
{{- $wrong = append $wrong "serviceMonitor and podMonitor are both enabled: everything would be scraped twice. Keep one" -}}
{{- end -}}
{{- if and .Values.serviceMonitor.enabled (not .Values.service.enabled) -}}
{{- $wrong = append $wrong "serviceMonitor is enabled and service is not: there is nothing to scrape through. Enable service, or use podMonitor" -}}
{{- end -}}

{{- $surge := dig "rollingUpdate" "maxSurge" 0 (default dict .Values.updateStrategy) | toString -}}
{{- if not (has $surge (list "0" "0%")) -}}
{{- if and $hostNetwork $port -}}
{{- $wrong = append $wrong (printf "updateStrategy.rollingUpdate.maxSurge is %s in the host's network: the new pod can't have the old one's port %s, and would never start. Use maxUnavailable, or settings.metrics_addr: \"off\"" $surge $port) -}}
{{- end -}}
{{- if not (or $settings.wait $settings.dry_run) -}}
{{- $wrong = append $wrong (printf "updateStrategy.rollingUpdate.maxSurge is %s and settings.wait is off: the new pod would exit at once, because the old one still runs. Set settings.wait: true, or use maxUnavailable" $surge) -}}
{{- end -}}
{{- end -}}

{{- range $name := list "run_dir" "pod_logs_dir" "container_logs_dir" -}}
{{- if eq (clean (get $settings $name)) "/" -}}
{{- $wrong = append $wrong (printf "settings.%s is the root directory, and is mounted: name a separate directory" $name) -}}
{{- end -}}
{{- end -}}
{{- range $settings.containers_dir -}}
{{- if eq (clean .) "/" -}}
{{- $wrong = append $wrong "settings.containers_dir has the root directory, and is mounted writable: name HAMi's directory" -}}
{{- end -}}
{{- end -}}
{{- if and $settings.socket (not (hasPrefix (printf "%s/" (clean $settings.run_dir)) (clean $settings.socket))) -}}
{{- $wrong = append $wrong (printf "settings.socket is %s, outside of settings.run_dir (%s): nothing else of the node is mounted, and no client would find it" $settings.socket $settings.run_dir) -}}
{{- end -}}
{{- if and .Values.tenantsView.policy (not $settings.tenant_socket) -}}
{{- $wrong = append $wrong (printf "tenantsView.policy mounts the directory of settings.tenant_socket, which is empty: set it to %s/tenants/resolver.sock" (clean $settings.run_dir)) -}}
{{- end -}}
{{- with $settings.tenant_socket -}}
{{- if not (hasPrefix (printf "%s/" (clean $settings.run_dir)) (dir (clean .))) -}}
{{- $wrong = append $wrong (printf "settings.tenant_socket is %s: containers mount its directory, so it must be a separate one below settings.run_dir, as in %s/tenants/resolver.sock" . (clean $settings.run_dir)) -}}
{{- end -}}
{{- end -}}
{{- with $settings.broker -}}
{{- if has (dir (dir (clean .))) (list "/" "/run" "/var" "/var/run" "/var/lib" "/etc" "/usr" "/tmp") -}}
{{- $wrong = append $wrong (printf "settings.broker is %s: the directory two above the socket is mounted writable, so nothing else may be in it, as in /var/run/hami/hostpid/broker.sock" .) -}}
{{- end -}}
{{- end -}}

{{- $names := append (keys $settings) "source" | sortAlpha -}}
{{- range .Values.extraEnv -}}
{{- $setting := trimPrefix "RESOLVER_" .name | lower -}}
{{- if and (hasPrefix "RESOLVER_" .name) (has $setting $names) -}}
{{- $wrong = append $wrong (printf "extraEnv has %s, which is a setting: write %s instead, because mounts and capabilities depend on it" .name (eq $setting "source" | ternary "source" (printf "settings.%s" $setting))) -}}
{{- end -}}
{{- if and (hasPrefix "RESOLVER_" .name) (not (has $setting (concat $names (list "config" "node" "report_metrics_addr")))) -}}
{{- $like := list -}}
{{- range $names -}}
{{- if eq (replace "_" "" .) (replace "_" "" $setting) -}}
{{- $like = append $like . -}}
{{- end -}}
{{- end -}}
{{- $like = default $names $like -}}
{{- $wrong = append $wrong (printf "extraEnv has %s, and there is no such setting: the daemon would not start with it. Did you mean %s?" .name (join ", settings." $like | printf "settings.%s" | replace "settings.source" "source")) -}}
{{- end -}}
{{- if hasKey (default dict $.Values.driverEnv) .name -}}
{{- $wrong = append $wrong (printf "extraEnv has %s, which is in driverEnv: change it there" .name) -}}
{{- end -}}
{{- end -}}
{{- range .Values.extraArgs -}}
{{- $option := splitList "=" . | first -}}
{{- $setting := trimPrefix "--" $option | replace "-" "_" -}}
{{- if and (hasPrefix "--" $option) (or (has $setting $names) (has (trimPrefix "no_" $setting) $names)) -}}
{{- $wrong = append $wrong (printf "extraArgs has %s, which is a setting: write %s instead, because mounts and capabilities depend on it" $option (eq $setting "source" | ternary "source" (printf "settings.%s" (trimPrefix "no_" $setting)))) -}}
{{- end -}}
{{- end -}}

{{- if $wrong -}}
{{- fail (printf "\n\nThe chart can't be rendered with these values:\n- %s\n" (join "\n- " $wrong)) -}}
{{- end -}}
{{- end }}
