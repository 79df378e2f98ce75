//! Queries of Prometheus in the packages' dashboards and alarms, compared with what a program serves.

/// Returns the queries of a dashboard, which is JSON.
pub fn of_dashboard(text: &str) -> Vec<String> {
    let dashboard: serde_json::Value = serde_json::from_str(text).unwrap();
    let panels = dashboard["panels"].as_array().unwrap().iter();
    let targets = panels.flat_map(|panel| panel["targets"].as_array().unwrap());
    targets.map(|target| target["expr"].as_str().unwrap().to_owned()).collect()
}

/// Returns the queries of a file of alarms. Each stands on one line.
pub fn of_alarms(text: &str) -> Vec<String> {
    let found: Vec<String> =
        text.lines().filter_map(|line| line.trim().strip_prefix("expr: ")).map(str::to_owned).collect();
    assert_eq!(found.len(), text.matches("- alert: ").count(), "each alarm has one query");
    found
}

/// Returns csid's metrics in a query, each with the labels by which the query selects. `up` is Prometheus' own.
pub fn metrics_of(query: &str) -> Vec<(String, Vec<String>)> {
    let mut found = Vec::new();
    for (at, _) in query.match_indices("csid_") {
        let rest = &query[at..];
        let end = rest.find(|c: char| !c.is_ascii_lowercase() && c != '_').unwrap_or(rest.len());
        let selector = rest[end..].strip_prefix('{').and_then(|rest| rest.split('}').next()).unwrap_or("");
        let labels = selector.split(',').filter_map(|one| one.split(['=', '!']).next());
        let labels = labels.filter(|label| !label.is_empty()).map(str::to_owned).collect();
        found.push((rest[..end].to_owned(), labels));
    }
    assert!(!found.is_empty() || query.starts_with("up{"), "{query} names no metric");
    found
}

/// Returns what queries ask for and a program does not serve. `samples`: what it serves, with labels. `is_its`: whether a metric is the
/// program's.
pub fn not_served<'a>(
    queries: &[String],
    samples: impl Iterator<Item = &'a String> + Clone,
    is_its: impl Fn(&str) -> bool,
) -> Vec<String> {
    let mut missing = Vec::new();
    for query in queries {
        for (metric, labels) in metrics_of(query).into_iter().filter(|(metric, _)| is_its(metric)) {
            let of_metric = |sample: &&String| sample.split('{').next() == Some(&metric);
            let served: Vec<_> = samples.clone().filter(of_metric).collect();
            if served.is_empty() {
                missing.push(format!("{query}: there is no {metric}"));
                continue;
            }
            let grouped = query.split("by (").skip(1).filter_map(|rest| rest.split(')').next());
            let grouped = grouped.flat_map(|of| of.split(", ")).filter(|label| *label != "instance");
            for label in labels.iter().map(String::as_str).chain(grouped) {
                let has = |sample: &&String| sample.contains(&format!("{label}=\""));
                if !served.iter().any(has) {
                    missing.push(format!("{query}: {metric} has no label {label}"));
                }
            }
        }
    }
    missing
}
