package main

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

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
		{"wait that a restore ends was in the way before", `{"call":"take","wait":9` + a + `"start":1,"end":8,"outcome":"refused"}
{"call":"take"` + b + `"start":2,"end":3,"outcome":"refused"}
{"call":"restore etcd","start":5}
{"call":"restored","start":9}
{"call":"take"` + b + `"start":10,"end":11,"outcome":"ok"}`, porcupine.Ok},
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
		{"owed unmount that the servers do not know in time", took + `
{"call":"joined","who":"n1","start":1}
{"call":"unmount"` + a + `"start":3,"end":4,"outcome":"ok"}
{"call":"read","client":3,"volume":"v","start":30000010,"end":30000011,"outcome":"ok","holders":["n1/a"]}
{"call":"rest","start":40000000}`, porcupine.Illegal},
		{"owed unmount of a host that is cut off", took + `
{"call":"joined","who":"n1","start":1}
{"call":"left","who":"n1","start":20000000}
{"call":"joined","who":"n1","start":21000000}
{"call":"unmount"` + a + `"start":3,"end":4,"outcome":"ok"}
{"call":"read","client":3,"volume":"v","start":30000010,"end":30000011,"outcome":"ok","holders":["n1/a"]}
{"call":"rest","start":60000000}`, porcupine.Ok},
		{"owed unmount of a host that has joined again", took + `
{"call":"left","who":"n1","start":2}
{"call":"unmount"` + a + `"start":3,"end":4,"outcome":"ok"}
{"call":"joined","who":"n1","start":10000000}
{"call":"read","client":3,"volume":"v","start":40000001,"end":40000002,"outcome":"ok","holders":["n1/a"]}
{"call":"rest","start":60000000}`, porcupine.Illegal},
		{"owed unmount while etcd is restored", took + `
{"call":"joined","who":"n1","start":1}
{"call":"unmount"` + a + `"start":3,"end":4,"outcome":"ok"}
{"call":"restore etcd","start":20000000}
{"call":"restored","start":25000000}
{"call":"read","client":3,"volume":"v","start":40000000,"end":40000001,"outcome":"ok","holders":["n1/a"]}
{"call":"rest","start":60000000}`, porcupine.Ok},
		{"attached volume is not detached in time", took + `
{"call":"joined","who":"n1","start":1}
{"call":"joined","who":"c1","start":2}
{"call":"release","attaches":true` + a + `"start":3,"end":4,"outcome":"ok"}
{"call":"read","client":3,"volume":"v","start":30000010,"end":30000011,"outcome":"ok","holders":["n1/a"]}
{"call":"rest","start":60000000}`, porcupine.Illegal},
		{"attached volume stays while its controller is away", took + `
{"call":"joined","who":"n1","start":1}
{"call":"release","attaches":true` + a + `"start":3,"end":4,"outcome":"ok"}
{"call":"read","client":3,"volume":"v","start":30000010,"end":30000011,"outcome":"ok","holders":["n1/a"]}
{"call":"rest","start":60000000}`, porcupine.Ok},
		{"wait that is granted when the holder lets the volume go", took + `
{"call":"release"` + a + `"start":5,"end":6,"outcome":"ok"}
{"call":"take","wait":9` + b + `"start":3,"end":7,"outcome":"ok"}`, porcupine.Ok},
		{"wait that is granted before the holder lets the volume go", took + `
{"call":"take","wait":9` + b + `"start":3,"end":4,"outcome":"ok"}
{"call":"release"` + a + `"start":5,"end":6,"outcome":"ok"}`, porcupine.Illegal},
		{"wait that is refused at its time", took + `
{"call":"take","wait":9` + b + `"start":3,"end":13,"outcome":"refused"}`, porcupine.Ok},
		{"wait that is refused before its time", took + `
{"call":"take","wait":9` + b + `"start":3,"end":11,"outcome":"refused"}`, porcupine.Illegal},
		{"wait that is refused while the volume is free", took + `
{"call":"release"` + a + `"start":5,"end":6,"outcome":"ok"}
{"call":"take","wait":9` + b + `"start":3,"end":13,"outcome":"refused"}`, porcupine.Illegal},
		{"place of a wait that the servers have refused", took + `
{"call":"joined","who":"n2","start":1}
{"call":"take","wait":9` + b + `"start":3,"end":13,"outcome":"refused"}
{"call":"release"` + a + `"start":14,"end":15,"outcome":"ok"}
{"call":"read","client":3,"volume":"v","start":16,"end":17,"outcome":"ok","holders":["n2/b"]}`, porcupine.Illegal},
		{"wait for a free volume is refused", took + `
{"call":"release"` + a + `"start":3,"end":4,"outcome":"ok"}
{"call":"take","wait":9` + b + `"start":5,"end":15,"outcome":"refused"}`, porcupine.Illegal},
		{"place of a refused wait that the servers keep for a time", took + `
{"call":"joined","who":"n2","start":1}
{"call":"take","wait":9,"waiting":true` + b + `"start":3,"end":13,"outcome":"refused"}
{"call":"release"` + a + `"start":14,"end":15,"outcome":"ok"}
{"call":"read","client":3,"volume":"v","start":16,"end":17,"outcome":"ok","holders":["n2/b"]}
{"call":"read","client":3,"volume":"v","start":30000010,"end":30000020,"outcome":"ok","holders":[]}`, porcupine.Ok},
		{"place of a refused wait that the servers keep for too long", took + `
{"call":"joined","who":"n2","start":1}
{"call":"take","wait":9,"waiting":true` + b + `"start":3,"end":13,"outcome":"refused"}
{"call":"release"` + a + `"start":14,"end":15,"outcome":"ok"}
{"call":"read","client":3,"volume":"v","start":30000014,"end":30000020,"outcome":"ok","holders":["n2/b"]}
{"call":"rest","start":40000000}`, porcupine.Illegal},
		{"refusal while another one waits", `{"call":"take","wait":9` + a + `"start":1,"end":9,"outcome":"unknown"}
{"call":"take"` + b + `"start":3,"end":4,"outcome":"refused"}`, porcupine.Ok},
		{"refusal after another one has waited", `{"call":"take","wait":9` + a + `"start":1,"end":2,"outcome":"ok"}
{"call":"release"` + a + `"start":3,"end":4,"outcome":"ok"}
{"call":"take"` + b + `"start":5,"end":6,"outcome":"refused"}`, porcupine.Illegal},
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

// No order fits, so porcupine tries each. Twenty open claims of one caller end when it is granted the volume.
func TestOpenClaimsOfOneEndAreDecidedSoon(t *testing.T) {
	const a, b = `,"who":"n1/a","client":1,"volume":"v","single":true,`, `,"who":"n2/b","client":2,"volume":"v","single":true,`
	var lines strings.Builder
	for n := range 20 {
		fmt.Fprintf(&lines, `{"call":"take"%s"start":%d,"end":%d,"outcome":"unknown"}`+"\n", a, 10*n+1, 10*n+2)
	}
	for _, granted := range []string{a, b} {
		fmt.Fprintf(&lines, `{"call":"take"%s"start":300,"end":400,"outcome":"ok"}`+"\n", granted)
	}
	operations, err := parse(strings.NewReader(lines.String()))
	if err != nil {
		t.Fatal(err)
	}
	if result := porcupine.CheckOperationsTimeout(volumes, operations, 10*time.Second); result != porcupine.Illegal {
		t.Errorf("judged %s", result)
	}
}

func TestObstacleNamesTheFirstCallThatFitsNowhere(t *testing.T) {
	const history = `{"call":"take","who":"n1/a","client":1,"volume":"v","single":true,"start":1,"end":2,"outcome":"ok"}
{"call":"take","who":"n2/b","client":2,"volume":"v","single":true,"start":3,"end":4,"outcome":"ok","error":"why"}
{"call":"release","who":"n1/a","client":1,"volume":"v","single":true,"start":5,"end":6,"outcome":"ok"}`
	operations, err := parse(strings.NewReader(history))
	if err != nil {
		t.Fatal(err)
	}
	_, info := porcupine.CheckOperationsVerbose(volumes, operations, patience)
	text := obstacle(operations, slices.Concat(info.PartialLinearizationsOperations()...))
	_, left, _ := strings.Cut(text, "left:")
	_, broken, _ := strings.Cut(text, "broken by:\n")
	broken, _, _ = strings.Cut(broken, "\n")
	if !strings.Contains(text, `holders then: "n1/a 1 false`) || !strings.HasPrefix(left, "\n  client 2, 3 to 4") ||
		!strings.HasPrefix(broken, "  client 2, 3 to 4") || !strings.HasSuffix(broken, "text:why}") {
		t.Error(text)
	}
}

func TestObstacleNamesTheRuleThatIsBroken(t *testing.T) {
	const took = `{"call":"take","who":"n1/a","client":1,"volume":"v","single":true,"start":1,"end":2,"outcome":"ok"}
`
	const other = `"who":"n2/b","client":2,"volume":"v","single":true,"start":13,"end":14,`
	for due, lines := range map[string]string{
		"granted only if no other one":      took + `{"call":"take",` + other + `"outcome":"ok"}`,
		"refused only if another one":       `{"call":"take",` + other + `"outcome":"refused"}`,
		"by a refusal at its time":          took + `{"call":"take","wait":9,` + other + `"outcome":"refused"}`,
		"holders that callers were granted": took + `{"call":"read",` + other + `"outcome":"ok","holders":[]}`,
	} {
		operations, err := parse(strings.NewReader(lines))
		if err != nil {
			t.Fatal(err)
		}
		_, info := porcupine.CheckOperationsVerbose(volumes, operations, patience)
		text := obstacle(operations, slices.Concat(info.PartialLinearizationsOperations()...))
		if rule, _, _ := strings.Cut(text, "\n"); !strings.HasPrefix(rule, "rule: ") || !strings.Contains(rule, due) {
			t.Errorf("%s: %s", due, text)
		}
	}
}

func TestManyOpenClaimsAreDecidedSoon(t *testing.T) {
	var lines strings.Builder
	for n := range 24 {
		fmt.Fprintf(&lines, `{"call":"take","who":"n%d/a","client":%d,"volume":"v","single":true,"start":%d,"end":40,"outcome":"unknown"}`+"\n", n, n, n)
	}
	for at := 50; at < 290; at += 10 {
		for n, call := range []string{"take", "release"} {
			fmt.Fprintf(&lines, `{"call":%q,"who":"c/a","client":99,"volume":"v","single":true,"start":%d,"end":%d,"outcome":"ok"}`+"\n", call, at+3*n, at+3*n+1)
		}
	}
	const read = `{"call":"read","client":98,"volume":"v","start":%d,"end":%d,"outcome":"ok","holders":[%q]}` + "\n"
	fmt.Fprintf(&lines, read, 300, 301, "n7/a")
	for last, due := range map[string]porcupine.CheckResult{"n9/a": porcupine.Ok, "c/a": porcupine.Illegal} {
		operations, err := parse(strings.NewReader(lines.String() + fmt.Sprintf(read, 302, 303, last)))
		if err != nil {
			t.Fatal(err)
		}
		if result := porcupine.CheckOperationsTimeout(volumes, operations, 20*time.Second); result != due {
			t.Errorf("%s: judged %s, want %s", last, result, due)
		}
	}
}

func TestUnknownLineIsAnError(t *testing.T) {
	for _, text := range []string{`{`, `{"call":"steal","volume":"v","outcome":"ok"}`, `{"call":"take","volume":"v","outcome":"no"}`} {
		if _, err := parse(strings.NewReader(text)); err == nil {
			t.Errorf("%s: no error", text)
		}
	}
}
