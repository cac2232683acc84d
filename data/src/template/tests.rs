//! Templates that would cost their reader time, memory or its stack.

use super::*;

fn render(source: &str) -> Result<String, TemplateError> {
    let message = [("role", "user"), ("content", "hi")];
    let text = |text: &str| crate::source::Json::Text(text.to_owned());
    let message = message.map(|(key, value)| (key.to_owned(), text(value)));
    let template = ChatTemplate::new(source, &BTreeMap::new(), None)?;
    template.render(&vec![message.into_iter().collect()], &Arguments::default())
}

/// A list of ten lists of ten lists, and so on: its text has ten to the power of `depth` items.
fn nested(depth: usize) -> String {
    let level = |level: usize| {
        let inner = vec![format!("a{level}"); 10].join(",");
        format!("{{% set a{} = [{inner}] %}}", level + 1)
    };
    format!("{{% set a0 = ['x'] %}}{}", (0..depth).map(level).collect::<String>())
}

#[test]
fn work_is_limited() {
    let text = "{% set x = 'a' * 10000000 %}";
    let forever = "{% for i in range(100000) %}";
    let nested = nested(9);
    for source in [
        format!("{forever}{forever}{{% endfor %}}{{% endfor %}}"),
        format!("{text}{forever}{{% set y = x.count('b') %}}{{% endfor %}}"),
        format!("{text}{forever}{{% set y = x|lower %}}{{% endfor %}}"),
        format!("{nested}{{{{ a9|tojson|length }}}}"),
        format!("{nested}{{% set text %}}{{{{ a9 }}}}{{% endset %}}"),
        "{{ ([0] * 100000)|tojson(indent='x' * 1000000) }}".to_owned(),
        "{{ 'a'|replace('a', 'a' * 1000)|replace('a', 'a' * 1000)|replace('a', 'a' * 1000) }}"
            .to_owned(),
    ] {
        let error = render(&source).expect_err(&source);
        assert!(matches!(error, TemplateError::Work { .. }), "{source:.100}: {error}");
    }
}

#[test]
fn output_is_limited() {
    let source = "{% set x = 'a' * 10000000 %}{% for i in range(10) %}{{ x }}{% endfor %}";
    let error = render(source).expect_err("100 MB");
    assert!(matches!(error, TemplateError::Output { .. }), "{error}");
}

#[test]
fn sizes_of_sources_are_limited() {
    let chain = |link: &str| format!("{{{{ 1{} }}}}", link.repeat(20_000));
    for source in [
        "x".repeat(300_000),
        chain("+x"),
        chain(" and 1"),
        chain("|abs"),
        format!("{{% if 1 %}}{}{{% endif %}}", "{% elif 1 %}".repeat(20_000)),
    ] {
        let error = render(&source).expect_err("too large");
        assert!(matches!(error, TemplateError::Large { .. }), "{error}");
    }
}

#[test]
fn what_is_deep_within_the_limits_does_not_overflow_the_stack() {
    let operators = format!("{{{{ 1{} }}}}", "+1".repeat(8000));
    assert_eq!(render(&operators).expect("a number"), "8001");
    let branches = format!("{{% if 0 %}}{}{{% endif %}}", "{% elif 0 %}".repeat(9000));
    assert_eq!(render(&branches).expect("nothing"), "");
    let lists = "{% set n = namespace(x=[]) %}{% for i in range(90000) %}{% set n.x = [n.x] %}{% endfor %}done";
    assert_eq!(render(lists).expect("a text"), "done");
    assert!(render("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}").is_err());
}

/// What Python's Jinja2 makes of the templates in `templates.json`, which `tests/templates.py` writes.
#[test]
fn templates_are_those_of_python() {
    #[derive(serde::Deserialize)]
    struct Golden {
        messages: Messages,
        cases: Vec<(String, Option<String>)>,
    }
    let golden = include_str!("../../tests/templates.json");
    let golden: Golden = serde_json::from_str(golden).expect("the script's output");
    let special = [("bos_token", "<s>"), ("eos_token", "</s>")];
    let special = special.map(|(name, text)| (name.to_owned(), text.to_owned())).into();
    let mut differ = Vec::new();
    let mut refused = Vec::new();
    for (source, expected) in &golden.cases {
        let template = ChatTemplate::new(source, &special, None);
        let found = template.and_then(|it| it.render(&golden.messages, &Arguments::default()));
        match (found, expected) {
            (Ok(found), Some(expected)) if found == *expected => {}
            (Ok(found), expected) => {
                differ.push(format!("{source}\n  here   {found:?}\n  Python {expected:?}"));
            }
            (Err(error), Some(_)) => refused.push(format!("{source}: {error}")),
            (Err(_), None) => {}
        }
    }
    println!("refused:\n{}", refused.join("\n"));
    assert!(
        differ.is_empty(),
        "{} of {} differ:\n{}",
        differ.len(),
        golden.cases.len(),
        differ.join("\n")
    );
}
