package main

import (
	"slices"
	"strings"
	"testing"

	"github.com/anishathalye/porcupine"
)

func TestCheckerJudgesHistories(t *testing.T) {
	const a, b = `,"who":"n1/a","client":1,"volume":"v","single":true,`, `,"who":"n2/b","client":2,"volume":"v","single":true,`
	const many1, many2 = `,"who":"n1/a","client":1,"volume":"v",`, `,"who":"n2/b","client":2,"volume":"v",`
	took := `{"call":"take"` + a + `"start":1,"end":2,"outcome":"ok"}`
	for _, history := range []struct {
		name, lines string
		due         porcupine.CheckResult
	}{
		{"one after the other", took + `
{"call":"release"` + a + `"start":3,"end":4,"outcome":"ok"}
{"call":"take"` + b + `"start":5,"end":6,"outcome":"ok"}`, porcupine.Ok},
		{"two writers", took + `
{"call":"take"` + b + `"start":3,"end":4,"outcome":"ok"}`, porcupine.Illegal},
		{"two writers of a shared volume", `{"call":"take"` + many1 + `"start":1,"end":2,"outcome":"ok"}
{"call":"take"` + many2 + `"start":3,"end":4,"outcome":"ok"}
{"call":"read","client":3,"volume":"v","start":5,"end":6,"outcome":"ok","holders":["n2/b","n1/a"]}`, porcupine.Ok},
		{"a shared volume is refused", `{"call":"take"` + many1 + `"start":1,"end":2,"outcome":"ok"}
{"call":"take"` + many2 + `"start":3,"end":4,"outcome":"refused"}`, porcupine.Illegal},
		{"release did not happen", took + `
{"call":"release"` + a + `"start":3,"end":4,"outcome":"ok"}
{"call":"take"` + b + `"start":5,"end":6,"outcome":"refused"}`, porcupine.Illegal},
		{"a free volume is refused", `{"call":"take"` + a + `"start":1,"end":2,"outcome":"refused"}`, porcupine.Illegal},
		{"lost claim", took + `
{"call":"read","client":3,"volume":"v","start":3,"end":4,"outcome":"ok","holders":[]}`, porcupine.Illegal},
		{"release of an attached volume ends late", took + `
{"call":"release","attaches":true` + a + `"start":3,"end":4,"outcome":"ok"}
{"call":"take"` + b + `"start":5,"end":6,"outcome":"refused"}
{"call":"take"` + b + `"start":7,"end":8,"outcome":"ok"}`, porcupine.Ok},
		{"released volume stays attached", took + `
{"call":"release","attaches":true` + a + `"start":3,"end":4,"outcome":"ok"}
{"call":"rest","start":5}
{"call":"read","client":3,"volume":"v","start":6,"end":7,"outcome":"ok","holders":["n1/a"]}`, porcupine.Illegal},
		{"claim that a backup lacks, and one that it has", took + `
{"call":"restore etcd","start":3}
{"call":"read","client":3,"volume":"v","start":4,"end":5,"outcome":"ok","holders":[]}
{"call":"release"` + a + `"start":6,"end":7,"outcome":"ok"}
{"call":"take"` + b + `"start":8,"end":9,"outcome":"refused"}
{"call":"restored","start":10}
{"call":"take"` + b + `"start":11,"end":12,"outcome":"ok"}`, porcupine.Ok},
		{"two writers during a restore", took + `
{"call":"restore etcd","start":3}
{"call":"take"` + b + `"start":4,"end":5,"outcome":"ok"}
{"call":"restored","start":6}`, porcupine.Illegal},
		{"lost claim after a restore", took + `
{"call":"restore etcd","start":3}
{"call":"restored","start":4}
{"call":"read","client":3,"volume":"v","start":5,"end":6,"outcome":"ok","holders":[]}`, porcupine.Illegal},
		{"claim that is made again before its answer", `{"call":"read","client":3,"volume":"v","start":2,"end":3,"outcome":"ok","holders":["n1/a"]}
{"call":"read","client":3,"volume":"v","start":4,"end":5,"outcome":"ok","holders":[]}
{"call":"take"` + a + `"start":1,"end":6,"outcome":"ok"}
{"call":"read","client":3,"volume":"v","start":7,"end":8,"outcome":"ok","holders":["n1/a"]}`, porcupine.Ok},
		{"claim that ends before its answer", `{"call":"read","client":3,"volume":"v","start":2,"end":3,"outcome":"ok","holders":["n1/a"]}
{"call":"read","client":3,"volume":"v","start":4,"end":5,"outcome":"ok","holders":[]}
{"call":"take"` + a + `"start":1,"end":6,"outcome":"ok"}
{"call":"read","client":3,"volume":"v","start":7,"end":8,"outcome":"ok","holders":[]}`, porcupine.Illegal},
		{"open release", took + `
{"call":"release"` + a + `"start":3,"end":4,"outcome":"unknown"}
{"call":"take"` + b + `"start":5,"end":6,"outcome":"ok"}`, porcupine.Ok},
		{"open release ends no later claim", took + `
{"call":"release"` + a + `"start":3,"end":4,"outcome":"unknown"}
{"call":"release"` + a + `"start":5,"end":6,"outcome":"ok"}
{"call":"take"` + a + `"start":7,"end":8,"outcome":"ok"}
{"call":"take"` + b + `"start":9,"end":10,"outcome":"ok"}`, porcupine.Illegal},
		{"open take", `{"call":"take"` + a + `"start":1,"end":2,"outcome":"unknown"}
{"call":"take"` + b + `"start":3,"end":4,"outcome":"refused"}
{"call":"take"` + b + `"start":5,"end":6,"outcome":"ok"}`, porcupine.Ok},
		{"owed unmount is in the way", took + `
{"call":"unmount"` + a + `"start":3,"end":4,"outcome":"ok"}
{"call":"take"` + b + `"start":5,"end":6,"outcome":"refused"}
{"call":"take"` + b + `"start":7,"end":8,"outcome":"ok"}`, porcupine.Ok},
		{"owed unmount never arrives", took + `
{"call":"unmount"` + a + `"start":3,"end":4,"outcome":"ok"}
{"call":"rest","start":5}
{"call":"read","client":3,"volume":"v","start":6,"end":7,"outcome":"ok","holders":["n1/a"]}`, porcupine.Illegal},
	} {
		t.Run(history.name, func(t *testing.T) {
			operations, err := parse(strings.NewReader(history.lines))
			if err != nil {
				t.Fatal(err)
			}
			if result := porcupine.CheckOperationsTimeout(volumes, operations, patience); result != history.due {
				t.Errorf("judged %s, want %s", result, history.due)
			}
		})
	}
}

func TestObstacleNamesTheFirstCallThatFitsNowhere(t *testing.T) {
	const history = `{"call":"take","who":"n1/a","client":1,"volume":"v","single":true,"start":1,"end":2,"outcome":"ok"}
{"call":"take","who":"n2/b","client":2,"volume":"v","single":true,"start":3,"end":4,"outcome":"ok"}
{"call":"release","who":"n1/a","client":1,"volume":"v","single":true,"start":5,"end":6,"outcome":"ok"}`
	operations, err := parse(strings.NewReader(history))
	if err != nil {
		t.Fatal(err)
	}
	_, info := porcupine.CheckOperationsVerbose(volumes, operations, patience)
	text := obstacle(operations, slices.Concat(info.PartialLinearizationsOperations()...))
	_, left, _ := strings.Cut(text, "left:")
	if !strings.Contains(text, `holders then: "n1/a 1 false`) || !strings.HasPrefix(left, "\n  client 2, 3 to 4") {
		t.Error(text)
	}
}

func TestUnknownLineIsAnError(t *testing.T) {
	for _, text := range []string{`{`, `{"call":"steal","volume":"v","outcome":"ok"}`, `{"call":"take","volume":"v","outcome":"no"}`} {
		if _, err := parse(strings.NewReader(text)); err == nil {
			t.Errorf("%s: no error", text)
		}
	}
}
