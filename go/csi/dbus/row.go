package dbus

import (
	"strings"

	"github.com/godbus/dbus/v5"

	"github.com/csid-project/csid/go/internal/row"
)

// values is an a{sv}, or an answer's arguments by their names, as a row.Row.
type values map[string]any

func of(given map[string]dbus.Variant) values {
	made := values{}
	for name, value := range given {
		made[name] = value.Value()
	}
	return made
}

// named gives an answer's arguments their names. Without names the only argument is the row.
func named(body []any, names []string) values {
	if len(names) == 0 && len(body) == 1 {
		given, _ := body[0].(map[string]dbus.Variant)
		return of(given)
	}
	made := values{}
	for i := range min(len(names), len(body)) {
		made[names[i]] = body[i]
	}
	return made
}

// properties converts the names of properties from PascalCase.
func properties(given values) values {
	made := values{}
	for name, value := range given {
		var kebab strings.Builder
		for i, letter := range name {
			if i > 0 && letter >= 'A' && letter <= 'Z' {
				kebab.WriteByte('-')
			}
			kebab.WriteString(strings.ToLower(string(letter)))
		}
		made[kebab.String()] = value
	}
	return made
}

func get[T any](v values, name string) T {
	value, _ := v[name].(T)
	return value
}

func (v values) Text(name string) string { return get[string](v, name) }

func (v values) Number(name string) uint64 {
	switch number := v[name].(type) {
	case uint64:
		return number
	case uint32:
		return uint64(number)
	case int64:
		return uint64(max(number, 0))
	}
	return 0
}

func (v values) Flag(name string) bool { return get[bool](v, name) }

func (v values) Texts(name string) []string { return get[[]string](v, name) }

func (v values) Map(name string) map[string]string { return get[map[string]string](v, name) }

func (v values) Rows(name string) []row.Row {
	var rows []row.Row
	switch list := v[name].(type) {
	case []map[string]dbus.Variant:
		for _, given := range list {
			rows = append(rows, of(given))
		}
	case []map[string]string:
		for _, given := range list {
			made := values{}
			for key, value := range given {
				made[key] = value
			}
			rows = append(rows, made)
		}
	}
	return rows
}

// tuples returns the rows of an a(…).
func (v values) tuples(name string, names ...string) []row.Row {
	var rows []row.Row
	for _, tuple := range get[[][]any](v, name) {
		rows = append(rows, named(tuple, names))
	}
	return rows
}

func (v values) Pairs() map[string]string {
	pairs := map[string]string{}
	for name := range v {
		pairs[name] = v.Text(name)
	}
	return pairs
}
